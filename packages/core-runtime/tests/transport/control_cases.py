"""Bodies in which ranks do different things."""

from __future__ import annotations

from hocket.errors import TransportError
from hocket.transport.peer import Peer, gather


def leave_early(peer: Peer) -> str:
    """Rank 1 is at the end, where the others still open a lane."""
    group = peer.group(list(range(peer.size)))
    assert group is not None
    try:
        if group.rank == 1:
            group.close()
        else:
            group.lane("gradients.0[3]")
    except TransportError as error:
        return str(error)
    return "nothing"


def form_groups_often(peer: Peer) -> list[bool]:
    """Groups that were formed before take no new communicator, whoever has known which; they work as new ones do."""
    counts = []
    for pair in [(0, 1), (0, 1), (1, 2), (0, 1), (1, 2)]:
        rest = tuple(rank for rank in range(peer.size) if rank not in pair)
        mine = pair if peer.rank in pair else rest
        group = peer.group(mine)
        assert group is not None
        assert gather(group, peer.rank) == list(mine)
        counts.append(_next_communicator())
    return [later == counts[2] for later in counts[3:]] + [counts[0] == counts[1]]


def open_many_lanes(peer: Peer) -> list[str]:
    lanes, told = [], ""
    try:
        for number in range(2100):
            lanes.append(peer.lane(f"gradients.0[{number}]"))
    except TransportError as error:
        told = str(error)
    for lane in lanes:
        lane.close()
    return [told, str(len(lanes))]


def _next_communicator() -> int:
    """Return a number that grows with the communicators in use."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    number: int = comm.py2f()
    comm.Free()
    return number
