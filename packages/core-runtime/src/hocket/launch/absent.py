"""Ranks of this host that ended before they joined the job, for which the others would wait forever.

Nothing else reports such a rank. It has left no note, as it never joined; its launcher, ours too, waits for all ranks;
and MPI waits for it within `MPI_Init`. But it was a process with the launcher's variables in its environment, and that
process has ended. Ranks of other hosts cannot be seen: a wait for them says so after a while.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from hocket.transport.job_notes import PID_FOLDER_VARIABLE
from hocket.transport.launchers import Launched
from hocket.transport.status import number_ranks

#: How a launcher calls this process's number among those of its host.
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
#: What tells a job from others on the same host; not all launchers set all.
_JOB = (
    PID_FOLDER_VARIABLE,
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "HOCKET_ISLAND",
)

# The parent of processes whose parent has ended.
_ADOPTER = 1

# Ranks of a host begin within less, and most have joined by then.
_FIRST_LOOK_S = 1.5
_LOOK_FOR_ABSENT_EVERY_S = 1.0
# In so many looks in a row a rank has to be missing.
_LOOKS = 2
# What a rank leaves the one before it to say why the job ends.
_TURN_S = 2.0
_MOST_TURNS = 3


class LocalRanks:
    """The processes of a job on this host, as /proc shows them.

    Args:
        launched: the launcher's facts about this process.
        environment: of this process, as `os.environ`.
        proc: the system's folder of processes.
    """

    def __init__(
        self, launched: Launched, environment: Mapping[str, str], proc: Path = Path("/proc")
    ) -> None:
        self._launched = launched
        self._proc = proc
        self._name = next((name for name in _LOCAL_RANKS if name in environment), "")
        self._job = {f"{name}={environment[name]}".encode() for name in _JOB if name in environment}
        self._found: dict[int, int] = {}  # processes by local rank
        self._own, self._starter = self._rank_and_starter(os.getpid())
        self._looks = 0  # in a row, in which the same were missing
        self._missing: list[int] = []

    def can_tell(self) -> bool:
        """Return whether /proc shows ranks of this host: this one and its parent at least."""
        # Else variables were set later, or this is a container's first process.
        return self._own == self._launched.local_rank and self._starter > 0

    def gone(self) -> list[int]:
        """Look, and return the local ranks that are missing in this look and the one before."""
        left = {rank for rank, process in self._found.items() if self._rank_of(process) != rank}
        self._found = {rank: process for rank, process in self._found.items() if rank not in left}
        if len(self._found) < self._launched.local_size:
            for process in self._processes():
                rank = self._rank_of(process)
                if rank is not None:
                    self._found.setdefault(rank, process)
        missing = [rank for rank in range(self._launched.local_size) if rank not in self._found]
        self._looks = self._looks + 1 if missing == self._missing else 1
        self._missing = missing
        return missing if missing and self._looks >= _LOOKS else []

    def before(self) -> int:
        """Return the number of present ranks of the host with a lower number than this one."""
        return sum(rank < self._launched.local_rank for rank in self._found)

    def _processes(self) -> Iterator[int]:
        return (int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit())

    def _rank_of(self, process: int) -> int | None:
        """Return a process's local rank; None if it is no rank's, or has outlived the rank that started it."""
        rank, starter = self._rank_and_starter(process)
        return None if starter == _ADOPTER != self._starter else rank

    def _rank_and_starter(self, process: int) -> tuple[int | None, int]:
        """Return a process's local rank, and the process that started this rank; 0 where it is not known."""
        rank = self._local_rank(process)
        while rank is not None and process > 0 and self._local_rank(process) == rank:
            process = self._parent(process)
        return rank, process

    def _local_rank(self, process: int) -> int | None:
        """Return the local rank of a process; None if it is no rank of the job, or has ended."""
        try:
            variables = set((self._proc / str(process) / "environ").read_bytes().split(b"\0"))
        except OSError:
            return None
        own = [entry for entry in variables if entry.startswith(f"{self._name}=".encode())]
        number = own[0].partition(b"=")[2] if own and self._job <= variables else b""
        return int(number) if number.isdigit() else None

    def _parent(self, process: int) -> int:
        try:
            return int((self._proc / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return 0


@contextlib.contextmanager
def watching(launched: Launched) -> Iterator[None]:
    """End this process with a line if a rank of its host ends while this one joins the job."""
    joined = threading.Event()
    if launched.local_size > 1:
        threading.Thread(target=_watch, args=(launched, joined), name="hocket joining", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _watch(launched: Launched, joined: threading.Event) -> None:
    if joined.wait(_FIRST_LOOK_S):
        return
    ranks = LocalRanks(launched, os.environ)
    if not ranks.can_tell():
        return
    while not (gone := ranks.gone()):
        if joined.wait(_LOOK_FOR_ABSENT_EVERY_S):
            return
    if joined.wait(_TURN_S * min(ranks.before(), _MOST_TURNS)):
        return
    from hocket.transport.host.endings import announce

    announce(_message(launched, gone), 1)
    os._exit(1)


def _message(launched: Launched, gone: list[int]) -> str:
    whole = launched.local_size == launched.size
    them = number_ranks(gone) + ("" if whole else " of this host")
    return (
        f"hocket: rank {launched.rank} waits for {them}, which {'has' if len(gone) == 1 else 'have'} ended before "
        "joining the job (sys.exit, or the end of the script?), so all ranks end. All must call hocket.attach or "
        "hocket.join"
    )
