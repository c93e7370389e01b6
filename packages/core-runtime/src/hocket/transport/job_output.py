"""A job's output without launchers' paragraphs about failed ranks, whose own parents say how they have ended."""

from __future__ import annotations

import codecs
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hocket.transport.job_notes import has_noted_ending, noted_status

__all__ = ["JobOutput", "Report", "telling"]

# Shells add to it the signal that has killed a process.
_SIGNALLED = 128
# More lines than these between two rules are somebody's own.
_MOST_LINES = 40

# What a paragraph of Open MPI's or MPICH's about failed ranks says; also Open MPI's warnings of each part that is not
# its own test of fault tolerance.
_PARAGRAPH = re.compile(
    r"exited\s+on\s+signal|exited with non-zero status|BAD TERMINATION|MPI_ABORT was invoked|calling\s+\"abort\"|"
    r"is\s+not\s+tested\s+for\s+post-failure"
)
# What both print outside of paragraphs.
_REMARK = re.compile(
    r"\[\S+:\d+\] PMIX ERROR: |"
    r"Abort\(\d+\) on node \d+|\[proxy:|\[mpiexec@|YOUR APPLICATION TERMINATED WITH|"
    r"This typically refers to a problem with your application|Please see the FAQ page|Abort is in progress|"
    r"NBC_Progress: an error 75|\[warn\] Epoll |\d+ more process(?:es have| has) sent help message help-mpi-(?:ft|api)"
)
# How a launcher's lines begin.
_BEGINNINGS = tuple("-=[AYTP\0")
# How a rank's own begin.
_OURS = "hocket: "
_WARNING = "hocket: warning: "
# What torch.distributed says where nobody has made its process group, or where it does not find what torchrun sets.
_PROCESS_GROUP = re.compile(
    r"Default process group has not been initialized|env:// rendezvous: environment variable \w+ expected"
)
# The line of a rank that has noticed another one's death.
_NOTICED = re.compile(r"hocket: (at step \d+, .*: ranks? .* ha(?:s|ve) died); all ranks end")
# The line of `_TELLING`, also after a line that the rank has not ended.
_ENDED = re.compile(r"hocket: rank (\d+) on (\S+) ended with status (\d+)\n")
# A rank's parent under a launcher: it says how the rank has ended, unless by the launcher, and ends in the same way.
_TELLING = """\
trap 'ended=1' TERM INT; trap : USR1 USR2
exec 3>&2 2>/dev/null # shells have words of their own for signals
(exec "$@" 2>&3 3>&-); status=$?
rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
[ $status = 0 ] || [ "$ended" ] || echo "hocket: rank $rank on $(uname -n) ended with status $status" >&3
trap - TERM INT USR1 USR2; ulimit -c 0
[ $status -le 128 ] || kill -$((status - 128)) $$
exit $status
"""


def telling(program: Sequence[str]) -> list[str]:
    """Return the command of a rank of a launcher that prints for `JobOutput` how `program` has ended."""
    return ["/bin/sh", "-c", _TELLING, "rank", *program]


@dataclass
class Report:
    """The cause of a job's end, where a rank died without a message of its own.

    Attributes:
        folder: holds a file for each rank that has joined, named by its process number, with the rank.
        ranks: number of the job's ranks on this host.
        cause: a sentence; empty if no rank died so.
        has_reason: whether a rank has given a reason of its own.
        noticed: another rank's sentence about a dead one; empty if there is none.
        wants_process_group: whether a rank has looked for torch.distributed's process group in vain.
        saved: whether the ranks, asked to end, have reported the outcome.
        status: the exit status, where a launcher's own may hide it; 0 where not known.
        end: ends the job, where its launcher leaves the others waiting for a rank that has ended.
        launchers: the launcher's paragraphs about failed ranks.
    """

    folder: Path
    ranks: int
    cause: str = ""
    has_reason: bool = False
    noticed: str = ""
    wants_process_group: bool = False
    saved: bool = False
    status: int = 0
    end: Callable[[], None] = lambda: None
    launchers: str = ""

    @property
    def message(self) -> str:
        """Return a sentence on why the job ended; empty where a rank has said it, or the cause is unknown."""
        return "; ".join(filter(None, [self.noticed, self.cause or (self.noticed and "all ranks end")]))

    def rank_ended(self, rank: int, host: str, status: int) -> None:
        """Note a rank's exit status, as shells say it."""
        number = status - _SIGNALLED
        if number in set(signal.Signals) and noted_status(self.folder) != status:
            self.rank_was_killed(rank, host, number)
        else:
            self.rank_left(rank, status)

    def rank_was_killed(self, rank: int, host: str, number: int) -> None:
        """Note that a signal has killed a rank; ranks that know it end themselves."""
        self.status = self.status or _SIGNALLED + number
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = " (out of memory? the kernel's log would tell)" if number == signal.SIGKILL else ""
        self._set_cause(f"rank {rank} on {host} was killed by {name}{hint}")
        if self.num_joined < self.ranks:
            self.end()  # ranks that start would wait for it forever within MPI_Init

    def rank_left(self, rank: int, code: int) -> None:
        """Note that a rank has ended with another exit status than 0, and end the others."""
        self.status = self.status or code
        if not has_noted_ending(self.folder):  # it, or the rank that it follows, has reported the cause
            self._set_cause(f"rank {rank} ended with exit code {code}")
        self.end()

    @property
    def num_joined(self) -> int:
        """Return the number of this host's ranks that have joined the job."""
        return len([*self.folder.glob("[0-9]*")])

    def _set_cause(self, cause: str) -> None:
        self.cause = self.cause or f"{cause}; all ranks were ended"


class JobOutput:
    """One of a job's two streams, filtered.

    Args:
        report: takes the launchers' paragraphs about failed ranks, and the lines on how ranks have ended.
        rule: the character of the lines around a launcher's paragraph: `-` for Open MPI, on standard error, `=`
            for MPICH, on standard output.
        write: takes all other output at once, unfinished lines too, as they may be progress bars.
    """

    def __init__(self, report: Report, rule: str, write: Callable[[str], object]) -> None:
        self._report = report
        self._rule = re.compile(f"{rule}{{74,90}}")
        self._write = write
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._paragraph: list[str] = []
        self._pending = ""
        self._in_line = False
        self._after_remark = False  # blank lines belong to it

    def copy(self, stream: IO[bytes]) -> None:
        """Read `stream` to its end and close it."""
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self.feed(data)
        self.close()

    def feed(self, data: bytes) -> None:
        """Handle the next bytes."""
        *lines, self._pending = (self._pending + self._decode(data)).split("\n")
        for line in lines:
            self._take(f"{line}\n")
        begun_otherwise = self._pending[:1] not in _BEGINNINGS and not _OURS.startswith(
            self._pending[: len(_OURS)]
        )
        if self._pending and not self._paragraph and (self._in_line or begun_otherwise):
            self._in_line = True
            self._write(self._pending)
            self._pending = ""

    def close(self) -> None:
        """Write the output that was kept back."""
        self._write("".join(self._paragraph) + self._pending.strip("\0"))
        self._paragraph, self._pending = [], ""

    def _take(self, line: str) -> None:
        line = line.lstrip("\0")  # Open MPI ends its paragraphs so
        bare = line.strip("\0 \n")
        if noticed := _NOTICED.fullmatch(bare):
            self._report.noticed = noticed[1]
            return
        if ended := _ENDED.search(line):
            self._report.rank_ended(int(ended[1]), ended[2], int(ended[3]))
            line = line[: ended.start()] + "\n"
            if line == "\n" and not self._in_line:
                return
            bare = line.strip()
        self._report.saved |= bare.startswith("hocket: asked to end: ")
        self._report.has_reason |= bare.startswith((_OURS, "Traceback ")) and not bare.startswith(_WARNING)
        self._report.wants_process_group |= bool(_PROCESS_GROUP.search(bare))
        if self._in_line:
            self._in_line = False
            self._write(line)
        elif self._paragraph:
            self._paragraph.append(line)
            if self._rule.fullmatch(bare) or len(self._paragraph) > _MOST_LINES:
                self._end_paragraph()
        elif self._rule.fullmatch(bare):
            self._paragraph = [line]
        elif _REMARK.match(bare):
            self._after_remark = True
        elif bare or not self._after_remark:
            self._after_remark = False
            self._write(line)

    def _end_paragraph(self) -> None:
        text = "".join(self._paragraph)
        if _PARAGRAPH.search(text) and len(self._paragraph) <= _MOST_LINES:
            self._report.launchers += text
        else:
            self._write(text)
        self._paragraph = []
