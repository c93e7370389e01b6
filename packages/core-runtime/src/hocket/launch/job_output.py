"""A job's output without the launchers' own paragraphs about failed ranks, which become a report."""

from __future__ import annotations

import codecs
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hocket.transport.job_notes import has_noted_ending

# More lines than these between two rules are somebody's own.
_MOST_LINES = 40

# What Open MPI and MPICH print outside of paragraphs.
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
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_LEFT = re.compile(r"Process name: \[\S+,(\d+)\] Exit code: (\d+)")
_MPICH = re.compile(r"PID (\d+) RUNNING AT (\S+) = EXIT CODE: (\d+)")
_ABORTED = re.compile(r'MPI_ABORT was invoked|calling "abort"')
# Open MPI warns so of every part that is not its own test of fault tolerance, such as shared windows; ours only end.
_UNTESTED = re.compile(r"is not tested for post-failure operation")
# Lines of Open MPI's launcher about its processes, where it is asked for them.
_LOG = re.compile(r"\[(\S+):\d+\] (?:\[prte\S*|mca: base:)")
_SIGNALLED = re.compile(r"child process \[\S+,(\d+)\] terminated with signal (.+)")
_EXITED = re.compile(r"proc \[\S+,(\d+)\] exited with non-zero status (\d+)")
_CALLED_ABORT = re.compile(r"proc \[\S+,\d+\] called abort with exit code (\d+)")
# The line of a rank that has noticed another one's death.
_NOTICED = re.compile(r"hocket: (at step \d+, .*: ranks? .* ha(?:s|ve) died); all ranks end")


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
    _aborted: bool = False

    @property
    def message(self) -> str:
        """Return a sentence on why the job ended; empty where a rank has said it, or the cause is unknown."""
        return "; ".join(filter(None, [self.noticed, self.cause or (self.noticed and "all ranks end")]))

    def read_log(self, line: str) -> None:
        """Read a line from the log of Open MPI's launcher."""
        log = _LOG.match(line)
        if log is None or self._aborted:
            return
        if aborted := _CALLED_ABORT.search(line):
            self._aborted = True  # it causes the other ranks' deaths
            self.status = self.status or int(aborted[1])
        elif signalled := _SIGNALLED.search(line):
            by = [number for number in range(1, signal.NSIG) if signal.strsignal(number) == signalled[2]]
            self.rank_was_killed(int(signalled[1]), log[1], by[0] if by else 0)
        elif exited := _EXITED.search(line):
            self.rank_left(int(exited[1]), int(exited[2]))

    def rank_was_killed(self, rank: int, host: str, number: int) -> None:
        """Note that a signal, 0 for an unknown one, has killed a rank; ranks that know it end themselves."""
        self._killed(f"rank {rank}", host, number)
        if self.num_joined < self.ranks:
            self.end()  # ranks that start would wait for it forever within MPI_Init

    def rank_left(self, rank: int, code: int) -> None:
        """Note that a rank has ended with another exit status than 0, and end the others."""
        self.status = self.status or code
        if not has_noted_ending(self.folder):  # it, or the rank that it follows, has reported the cause
            self._left(rank, code)
        self.end()

    @property
    def num_joined(self) -> int:
        """Return the number of this host's ranks that have joined the job."""
        return len([*self.folder.glob("[0-9]*")])

    def read(self, paragraph: str) -> bool:
        """Read a paragraph; return whether it is a launcher's, to be left out."""
        text = " ".join(paragraph.split())
        if killed := _KILLED.search(text):
            self._killed(f"rank {killed[1]}", killed[2], int(killed[3]))
        elif left := _LEFT.search(text):
            self._left(int(left[1]), int(left[2]))
        elif mpich := _MPICH.search(text):
            process, host, code = mpich[1], mpich[2], int(mpich[3])
            file = self.folder / process
            who = f"rank {file.read_text()}" if file.exists() else f"process {process}"
            if code == signal.SIGKILL:
                # The proxy kills all ranks when one is gone, and may report one of these.
                self._set_cause(
                    f"a rank on {host} (possibly {who}) was killed by SIGKILL (out of memory?), or ended without a "
                    "message"
                )
            elif code in set(signal.Signals):
                self._killed(who, host, code)
        else:
            return bool(_ABORTED.search(text) or _UNTESTED.search(text))
        return True

    def _left(self, rank: int, code: int) -> None:
        self.status = self.status or code
        self._set_cause(f"rank {rank} ended with exit code {code}")

    def _killed(self, who: str, host: str, number: int) -> None:
        self.status = self.status or 128 + number
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number or '?'}"
        hint = " (out of memory? see the kernel's log)" if number == signal.SIGKILL else ""
        self._set_cause(f"{who} on {host} was killed by {name}{hint}")

    def _set_cause(self, cause: str) -> None:
        self.cause = self.cause or f"{cause}; all ranks were ended"


class JobOutput:
    """One of a job's two streams, filtered.

    Args:
        report: takes the launchers' lines about failed ranks.
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
        self._report.saved |= bare.startswith("hocket: asked to end: ")
        self._report.has_reason |= bare.startswith((_OURS, "Traceback ")) and not bare.startswith(_WARNING)
        self._report.wants_process_group |= bool(_PROCESS_GROUP.search(bare))
        if _LOG.match(bare):
            self._report.read_log(bare)
        elif self._in_line:
            self._in_line = False
            self._write(line)
        elif self._paragraph:
            self._paragraph.append(line)
            if self._rule.fullmatch(bare):
                self._end_paragraph(known=self._report.read("".join(self._paragraph)))
            elif len(self._paragraph) > _MOST_LINES:
                self._end_paragraph(known=False)
        elif self._rule.fullmatch(bare):
            self._paragraph = [line]
        elif _REMARK.match(bare):
            self._after_remark = True
        elif bare or not self._after_remark:
            self._after_remark = False
            self._write(line)

    def _end_paragraph(self, *, known: bool) -> None:
        if not known:
            self._write("".join(self._paragraph))
        self._paragraph = []
