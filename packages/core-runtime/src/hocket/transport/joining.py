"""Find the world that this process was started in."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from functools import cache

from hocket.errors import UserError
from hocket.transport.peer import Peer
from hocket.transport.single import SinglePeer

__all__ = ["has_joined", "join", "launched_rank", "launched_ranks", "local_ranks"]

_log = logging.getLogger("hocket")

# (name of the launcher, variable with the number of ranks it started). The first that says more than one counts: one is
# what a shell in a job has, or what somebody has left there.
_LAUNCHERS = (
    ("Open MPI's mpiexec", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH's mpiexec", "PMI_SIZE"),
    ("torchrun", "WORLD_SIZE"),
    ("srun", "SLURM_STEP_NUM_TASKS"),
)

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")

# Where a size is not called as its rank is.
_SIZES = {"FLUX_TASK_RANK": "FLUX_JOB_SIZE", "MPIRUN_RANK": "MPIRUN_NPROCS", "PMIX_RANK": "PMIX_SIZE"}

_joined = False


def launched_ranks() -> tuple[str, int] | None:
    """Return the launcher that started this process and how many ranks it promised, at least 2; None outside one.

    Raises:
        UserError: the launcher's variable holds no number.
    """
    for launcher, variable in _LAUNCHERS:
        value = os.environ.get(variable)
        if value is not None:
            if not value.isdigit():
                raise UserError(f"{variable}={value!r} in the environment is no number of ranks")
            if int(value) > 1:
                return launcher, int(value)
    return None


def launched_rank() -> int:
    """Return which rank the launcher has made this process, known before MPI starts; 0 where it does not say."""
    return _first_number(_RANKS, 0)


def local_ranks() -> int:
    """Return how many ranks the launcher has started on this host; 1 where it does not say."""
    return _first_number(_LOCAL_RANKS, 1)


def unknown_launcher() -> list[str]:
    """Return the variables, with their values, by which this looks like one of several ranks, if it does."""
    numbers = {name: int(value) for name, value in os.environ.items() if value.isdigit()}
    ranks = {name: rank for name, rank in numbers.items() if re.fullmatch(r"(.+_)?RANK(ID)?", name)}
    found = {name for name, rank in ranks.items() if rank > 0}
    for name, rank in ranks.items():
        for size in (name.removesuffix("ID").removesuffix("RANK") + "SIZE", _SIZES.get(name, "")):
            if numbers.get(size, 0) > max(1, rank):
                found |= {name, size}
    return [f"{name}={numbers[name]}" for name in sorted(found)]


@cache
def _warn_of_strangers() -> None:
    """Say once where a launcher that is not known may have started other processes like this one."""
    found = unknown_launcher()
    if found:
        _log.warning(
            "hocket: this process trains alone, but it looks like one of several ranks (%s in the environment): start "
            "them with mpiexec, torchrun or srun, or unset these variables",
            ", ".join(found),
        )


def _first_number(variables: Sequence[str], default: int) -> int:
    values = (os.environ.get(variable, "") for variable in variables)
    return next((int(value) for value in values if value.isdigit()), default)


def has_joined() -> bool:
    """Return whether this process is one of a job's ranks, all of which an error ends that nobody catches."""
    return _joined


def join() -> Peer:
    """Return this process's, or this virtual rank's, endpoint in the world it was started in.

    Inside `hocket.virtual(n).run` that is the virtual world, under a launcher MPI's, else a world of one rank.

    Raises:
        UserError: the launcher started more ranks than MPI finds, or MPI is not installed.
    """
    from hocket.transport import virtual

    peer = virtual.current_peer()
    if peer is not None:
        return peer
    launched = launched_ranks()
    if launched is None:
        _warn_of_strangers()
        return SinglePeer()
    launcher, promised = launched
    try:
        from hocket.transport.mpi import join as join_mpi
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{launcher} started {promised} ranks, but MPI cannot be used ({error}): "
            "pip install 'hocket-core[mpi]'"
        ) from error
    world = join_mpi()
    if world.size != promised:
        raise UserError(
            f"{launcher} started {promised} ranks, but MPI finds {world.size}: start the script with the mpiexec "
            "of the MPI that mpi4py uses (`hocket doctor` names it)"
        )
    global _joined
    _joined = True
    return world
