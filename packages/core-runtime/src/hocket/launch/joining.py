"""The joining of a job: it finds the world that this process was started in."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.launch.absent import watching
from hocket.launch.island_jobs import find_in_islands, refuse_without_ranks
from hocket.launch.mpi_there import why_no_mpi4py
from hocket.launch.rank_process import allow_files
from hocket.launch.torch_variables import group_variables, missing_variables
from hocket.patience import speaking_after
from hocket.transport.job_notes import note_pid
from hocket.transport.launchers import Launched, looks_launched
from hocket.transport.peer import Peer
from hocket.transport.single import SinglePeer
from hocket.transport.waiting import STALL_REPORT_AFTER_S

_log = logging.getLogger("hocket")

_joined: Peer | None = None
#: What the launcher's variables said then.
_place: tuple[object, ...] = ()


def launched() -> Launched | None:
    """Return the facts of the launcher, or of torch's process group, about this process; None without both.

    Raises:
        UserError: the launcher's variables hold no numbers, or do not belong together.
    """
    found = find_in_islands(os.environ)
    if found is None and (group := group_variables(os.environ)):
        found = find_in_islands(os.environ | group)
    return found


def launched_rank() -> int:
    """Return this process's rank by its launcher, before ranks join; 0 if it gives none."""
    try:
        found = launched()
    except UserError:
        return 0
    return 0 if found is None else found.rank


def speaks_first() -> bool:
    """Return whether this process reports an error of all ranks: its launcher's first rank, before ranks join."""
    try:
        found = launched()
    except UserError:
        return True
    if found is None:
        return True
    return found.rank == 0 or (found.rendezvous is not None and found.rendezvous.place == 0)


def chosen_transport(found: Launched, asked: str | None = None) -> str:
    """Return the transport of ranks that a launcher has started: MPI if it is installed and possible.

    Args:
        found: the launcher's facts.
        asked: the transport that the user wants; None for the best.

    Raises:
        UserError: they cannot use the transport that was asked for.
    """
    can = found.transports
    if asked is not None and asked not in can:
        raise UserError(
            f"{found.launcher} starts ranks for transport {' or '.join(can)}, not {asked}: start without "
            "this launcher, or do not name a transport"
        )
    return asked or (can[0] if why_no_mpi4py() is None else can[-1])


@cache
def _warn_of_strangers() -> bool:
    """Return whether an unknown launcher may have started others like this process, with a warning the first time."""
    found = looks_launched(os.environ)
    if found:
        _log.warning(
            "this process trains alone, but it looks like one of several ranks (%s in the environment): start the "
            "ranks with `hocket launch -n 4 SCRIPT`, mpiexec, torchrun or srun, or unset these variables",
            ", ".join(found),
        )
    return bool(found)


@cache
def _warn_alone() -> None:
    if not _warn_of_strangers():
        _log.warning("one rank trains alone: start several with `hocket launch -n 4 SCRIPT`")


def has_joined() -> bool:
    """Return whether this process is a rank of a job, which an uncaught error ends as a whole."""
    return _joined is not None


def join(transport: str | None = None, *, torch_variables: bool = False, warn_alone: bool = False) -> Peer:
    """Return this process's, or this virtual rank's, endpoint in the world it was started in.

    Inside `hocket.virtual(n).run` that is the virtual world; under a launcher the same endpoint each time; else a
    world of one rank.

    Args:
        transport: `mpi` or `torch`, where the launcher leaves a choice; by default MPI where it is installed.
        torch_variables: set RANK, WORLD_SIZE, MASTER_ADDR and the others of torchrun's where the launcher
            (mpiexec, srun) does not, so that libraries on torch.distributed find the same ranks; collective.
        warn_alone: warn if no launcher has started this process, as frameworks' scripts do not show it.

    Raises:
        UserError: the launcher started more ranks than MPI finds, or MPI is not installed.
    """
    global _joined, _place
    from hocket.transport import virtual

    peer = virtual.current_peer()
    if peer is not None:
        return peer
    if _joined is not None:
        _refuse_another(_joined)
    else:
        found = launched()
        if found is None:
            refuse_without_ranks(os.environ)
            _warn_of_strangers()
            if warn_alone:
                _warn_alone()
            return SinglePeer()
        chosen = chosen_transport(found, transport)
        allow_files(found.size)
        with watching(found):
            _joined = _join(found, chosen)
        _place = _place_of(found, _joined)
        note_pid(_joined.rank)
    if torch_variables:
        _set_torch_variables(_joined)
    return _joined


def _set_torch_variables(peer: Peer) -> None:
    found = launched()
    if found is not None:
        os.environ.update(missing_variables(found, peer, os.environ))


def _place_of(found: Launched, peer: Peer) -> tuple[object, ...]:
    """Return the rank and the job of this process, by its launcher's variables."""
    there = found.rendezvous
    # Over MPI a script may name a place of its own, for a process group of torch's.
    meeting = (there.host, there.port, there.prefix) if there and peer.transport == "torch" else ()
    return found.rank, found.size, *meeting


def _refuse_another(peer: Peer) -> None:
    """Refuse variables of another job than the one that this process has joined.

    Raises:
        UserError: they are of another job; names both.
    """
    found = launched()
    now = _place if found is None else _place_of(found, peer)
    if now != _place:
        raise UserError(
            f"this process joined a job as rank {_describe(_place)}, but its environment now says rank "
            f"{_describe(now)}: a process can join one job only. Start another process for the other job"
        )


def _describe(place: tuple[object, ...]) -> str:
    rank, size, *meeting = place
    return f"{rank} of {size}" + (f" at {meeting[0]} port {meeting[1]}" if meeting else "")


def _join(found: Launched, transport: str) -> Peer:
    if transport == "mpi":
        return _meet_over_mpi(found)
    from hocket.transport import tcp

    assert found.rendezvous is not None
    return tcp.join(found.rendezvous)


def _meet_over_mpi(found: Launched) -> Peer:
    with speaking_after(STALL_REPORT_AFTER_S, lambda: _say_whom(found)):
        try:
            from hocket.transport.mpi import join as join_mpi  # MPI waits in it for all ranks
        except Exception as error:  # whatever a broken installation raises
            raise UserError(
                f"{found.launcher} started {found.size} ranks, but MPI cannot be used ({error}): "
                f"{how_to_install('hocket-core', 'mpi')}, or start them with `hocket launch --transport torch` or "
                "torchrun"
            ) from error
        world = join_mpi()
    if world.size != found.size:
        raise UserError(
            f"{found.launcher} started {found.size} ranks, but MPI finds {world.size}: start the script with the "
            "mpiexec of the MPI that mpi4py uses (`hocket doctor` names it), or with torchrun or srun --mpi=none, "
            "which do not need MPI"
        )
    return world


def _say_whom(found: Launched) -> None:
    print(
        f"hocket: rank {found.rank} waits for other ranks of {found.size} to join the job: for "
        f"{STALL_REPORT_AFTER_S:.0f} s so far. All ranks must call hocket.attach or hocket.join",
        file=sys.stderr,
        flush=True,
    )
