"""The ranks' part of tests of a peer, besides its lanes.

Rank r's right neighbour is r + 1, its left one r - 1; alone it is its own neighbour.
"""

from __future__ import annotations

import numpy as np

from hocket.errors import TransportError
from hocket.transport.peer import Peer


def rank_and_size(peer: Peer) -> list[int]:
    lane = peer.lane("a")
    assert (lane.rank, lane.size, lane.name) == (peer.rank, peer.size, "a")
    return [peer.rank, peer.size]


def allgather_lengths(peer: Peer) -> list[list[int]]:
    assert peer.allgather_bytes(b"") == [b""] * peer.size
    return [list(data) for data in peer.allgather_bytes(bytes([peer.rank]) * (3 * peer.rank), timeout_s=60)]


def gather_for_different_calls(peer: Peer) -> str:
    """Gather for one call, each rank in its own words, then for different ones; return the refusal."""
    assert len(peer.allgather_bytes(b"", what=f"one call: as rank {peer.rank}")) == peer.size
    try:
        peer.allgather_bytes(b"", what="another call" if peer.rank == 0 else "one call")
    except TransportError as error:
        return str(error)
    return ""


def split_by_parity(peer: Peer) -> None:
    ranks = range(peer.rank % 2, peer.size, 2)
    group = peer.group(ranks)
    assert group is not None
    assert (group.rank, group.size) == (peer.rank // 2, len(ranks))
    assert group.allgather_bytes(bytes([peer.rank])) == [bytes([rank]) for rank in ranks]
    lane, received, total = group.lane("a"), np.zeros(1), np.zeros(1)
    left, right = neighbours(group)
    send = lane.isend(np.array([float(group.rank)]), right, 0)
    lane.irecv(received, left, 0).wait()
    send.wait()
    assert received[0] == left
    lane.iallreduce(np.array([float(peer.rank)]), total).wait()
    assert total[0] == sum(ranks)
    group.close()


def group_backwards(peer: Peer) -> None:
    ranks = [rank for rank in reversed(range(peer.size)) if rank != 1]
    group = peer.group(ranks)
    if peer.rank == 1:
        assert group is None
    else:
        assert group is not None
        assert group.rank == ranks.index(peer.rank)
        assert group.allgather_bytes(bytes([peer.rank])) == [bytes([rank]) for rank in ranks]
        word = np.array([peer.rank])
        group.lane("a").ibroadcast(word, 0).wait()
        assert word[0] == ranks[0]
    assert peer.group([]) is None


def halve_until_alone(peer: Peer) -> None:
    group, mine = peer, list(range(peer.size))
    while group.size > 1:
        half = group.size // 2
        keep = range(half) if group.rank < half else range(half, group.size)
        mine = [mine[rank] for rank in keep]
        smaller = group.group(keep)
        assert smaller is not None
        group = smaller
        assert group.allgather_bytes(bytes([peer.rank])) == [bytes([rank]) for rank in mine]
    assert mine == [peer.rank]


def stay_on_the_host(peer: Peer) -> None:
    """A device that nobody has gives no peer, on all ranks alike."""
    assert (peer.device, peer.ordered) == ("cpu", False)
    assert peer.on_device("meta") is None


def allocate_sizes(peer: Peer) -> None:
    for nbytes in (0, 1, 63, 64, 100_001):
        memory = peer.memory.allocate(nbytes)
        assert (memory.nbytes, memory.dtype) == (nbytes, np.dtype(np.uint8))
        assert nbytes == 0 or memory.ctypes.data % 64 == 0
        memory[:] = 7


def reopen_lanes(peer: Peer) -> None:
    left, right = neighbours(peer)
    for number in range(10):
        lane, received = peer.lane("a"), np.zeros(1)
        receive, send = lane.irecv(received, left, 0), lane.isend(np.full(1, float(number)), right, 0)
        receive.wait()
        send.wait()
        assert received[0] == number
        lane.close()


def look_at_the_clock(peer: Peer) -> None:
    before = peer.clock.now()
    peer.clock.elapse(0.01)
    peer.status.note_step(1)
    peer.lane("a").ibarrier().wait()
    assert peer.clock.now() >= before
    before = peer.clock.now()
    peer.clock.sleep(0.01)
    assert peer.clock.now() >= before + 0.01 - 1e-6
    assert isinstance(peer.status.describe(), str)


def neighbours(peer: Peer) -> tuple[int, int]:
    return (peer.rank - 1) % peer.size, (peer.rank + 1) % peer.size
