"""The settings of every rank's process at its start: allocator, threads, and an end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir

from hocket.errors import UserError

_PR_SET_PDEATHSIG = 1

# glibc gives freed memory back to the system as soon as 40 MB lie together, and a step frees all gradients: 100 MB of
# them cost 25 to 60 ms of page faults in the next step, or none, as it happens. So ranks keep what they free, and what
# is new comes in pages of 2 MB where the system has them: a heap that others cut up still grows for dozens of steps.
# Other C libraries ignore these. The mapping threshold is the largest that glibc takes; setting either of the first two
# ends its own guesses.
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

# torch's sockets warn of each host whose address has no name, and of each missing answer.
_LOG_LEVEL = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

# Python, torch and a transport have 40 files open; each other rank takes a connection, memory and a watch on its end.
_FILES_ALONE, _FILES_EACH = 64, 4

# What a process that imports torch has to itself, without a model; the pages of libraries are shared.
_MEMORY_EACH = 100 << 20
_MEMORY = "/proc/meminfo"

# By these torchrun would have started what a rank starts in its turn.
_TORCHRUNS = "TORCHELASTIC_"


def own_python() -> list[str]:
    """Return the command of this Python, for a module of Hocket's.

    The working directory is not searched for modules, unless `python -m` does so here: a random.py in it would replace
    Python's own.
    """
    by_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return [sys.executable, *([] if by_module and not sys.flags.safe_path else ["-P"])]


def threads_per_rank(local_ranks: int) -> int:
    """Return the number of compute threads of each of a host's ranks: its share of the cores, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def variables_of_ranks(local_ranks: int) -> dict[str, str]:
    """Return the environment of ranks that share a host; the user's own settings win."""
    own: Mapping[str, str] = {
        name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUNS)
    }
    added = {**ALLOCATOR, **_LOG_LEVEL, **home(), "OMP_NUM_THREADS": str(threads_per_rank(local_ranks))}
    return {**added, **own}


def forwarded(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks of other hosts have as those of this one: ssh brings nothing along."""
    names = (*ALLOCATOR, "OMP_NUM_THREADS", "PYTHONPATH")
    return {name: value for name, value in variables.items() if name in names or name.startswith("HOCKET_")}


def home() -> dict[str, str]:
    """Return HOME if the environment has none, as a service's: Open MPI does not start without it.

    It is the user's folder, or the one for temporary files if the system knows none.
    """
    if os.environ.get("HOME"):
        return {}
    found = os.path.expanduser("~")
    return {"HOME": found if os.path.isdir(found) else gettempdir()}


def allow_files(ranks: int) -> None:
    """Raise the limit of open files of this process and its children to the needs of `ranks` ranks.

    Raises:
        UserError: the system does not allow it.
    """
    needed = _FILES_ALONE + _FILES_EACH * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"a process of a job of {ranks} ranks opens up to {needed} files and connections, but this one may open "
            f"{hard}: raise the limit with `ulimit -n {needed}` before the command, or in /etc/security/limits.conf"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_memory(ranks: int) -> None:
    """Refuse more ranks than the memory of this host holds.

    Raises:
        UserError: each would take what Python and torch take, and this host has not as much left.
    """
    if not os.path.exists(_MEMORY):  # no Linux
        return
    _, available = host_memory()
    most = available // _MEMORY_EACH
    if ranks > most:
        raise UserError(
            f"{ranks} ranks take {ranks * _MEMORY_EACH / 1e9:,.0f} GB of memory or more, but this host has "
            f"{available / 1e9:,.1f} GB left, enough for {most}: start fewer ranks, use more hosts (--hosts), or "
            "threads of one process (--transport virtual)"
        )


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory that this host has, and those that are available."""
    read = dict(re.findall(r"(\w+):\s+(\d+) kB", Path(_MEMORY).read_text()))
    return int(read["MemTotal"]) * 1024, int(read["MemAvailable"]) * 1024


def end_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when its parent is killed; Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
