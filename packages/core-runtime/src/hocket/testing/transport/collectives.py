"""The ranks' part of tests of native collectives."""

from __future__ import annotations

import numpy as np

from hocket.arrays import Array
from hocket.transport.peer import Peer

DTYPES = ("float32", "float64", "int32", "int64")


def allreduce_against_numpy(peer: Peer, dtype: str, counts: list[int]) -> None:
    lane = peer.lane("a")
    for count in counts:
        sent = [_draw(dtype, count, rank) for rank in range(peer.size)]
        mine, total = sent[peer.rank].copy(), np.full(count, 99).astype(dtype)
        lane.iallreduce(mine, total).wait()
        np.testing.assert_array_equal(mine, sent[peer.rank])
        _check_sum(total, sent)
        assert len(set(peer.allgather_bytes(total.tobytes()))) == 1


def allreduce_on_two_lanes(peer: Peer) -> None:
    lanes = [peer.lane("a"), peer.lane("b")]
    totals = [np.zeros(4), np.zeros(4)]
    order = (0, 1) if peer.rank % 2 == 0 else (1, 0)
    requests = [lanes[number].iallreduce(np.full(4, 1.0 + 99 * number), totals[number]) for number in order]
    for request in requests:
        request.wait()
    assert [total[0] for total in totals] == [peer.size, 100 * peer.size]


def allreduce_while_others_are_under_way(peer: Peer) -> None:
    lane = peer.lane("a")
    counts = [50_000, 1, 300]
    totals = [np.zeros(count) for count in counts]
    requests = [lane.iallreduce(np.full(count, float(count)), totals[i]) for i, count in enumerate(counts)]
    for request in reversed(requests):
        request.wait()
    for count, total in zip(counts, totals, strict=True):
        assert (total == count * peer.size).all()


def reduce_to_everyone(peer: Peer, dtype: str, counts: list[int]) -> None:
    lane = peer.lane("a")
    for root in range(peer.size):
        for count in counts:
            sent = [_draw(dtype, count, rank) for rank in range(peer.size)]
            mine = sent[peer.rank].copy()
            total = np.zeros(count, dtype) if peer.rank == root else None
            assert lane.ireduce(mine, total, root).wait() is None
            np.testing.assert_array_equal(mine, sent[peer.rank])
            if total is not None:
                _check_sum(total, sent)


def broadcast_from_everyone(peer: Peer) -> None:
    lane = peer.lane("a")
    for root in range(peer.size):
        for count in (0, 1, 50_000):
            data = np.full(count, peer.rank, np.int32)
            lane.ibroadcast(data, root).wait()
            assert (data == root).all()


def come_late_to_a_barrier(peer: Peer) -> None:
    lane, word = peer.lane("a"), np.zeros(1)
    if peer.rank > 0:
        barrier = lane.ibarrier()
        for _ in range(20):
            assert not barrier.done()  # rank 0 waits for the message below
        lane.isend(word, 0, 0).wait()
        barrier.wait()
    else:
        for source in range(1, peer.size):
            lane.irecv(word, source, 0).wait()
        lane.ibarrier().wait()


def _check_sum(total: Array, addends: list[Array]) -> None:
    floats = total.dtype.kind == "f"
    exact = np.sum(np.array(addends, "longdouble" if floats else total.dtype), axis=0)
    tolerance = len(addends) * np.finfo(total.dtype).eps if floats else 0
    magnitude = np.sum(np.abs(np.array(addends, "float64")), axis=0)
    assert (np.abs(total - exact) <= tolerance * magnitude).all()


def _draw(dtype: str, count: int, rank: int) -> Array:
    draw = np.random.default_rng([rank, count])
    if dtype.startswith("float"):
        return draw.standard_normal(count).astype(dtype)
    return draw.integers(-(2**20), 2**20, count).astype(dtype)
