"""The ranks' part of tests of gatherings: messages of different lengths, from everyone to everyone."""

from __future__ import annotations

import gc
import random
from typing import cast

import numpy as np

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request


def gather_lengths(peer: Peer) -> None:
    lane, capacity = peer.lane("a", 5000), 5000
    receive = np.empty((peer.size, capacity), np.uint8)
    for round, lengths in enumerate(
        [
            [1] * peer.size,
            [0] * peer.size,
            [capacity] * peer.size,
            [capacity * (rank == peer.size - 1) for rank in range(peer.size)],
            [rank * 37 % 50 for rank in range(peer.size)],
        ]
    ):
        receive[:] = 255
        mine = _message(peer.rank, round, lengths[peer.rank])
        request = lane.iallgather(mine, receive)
        waited = request.wait()
        for gathered in (waited, request.result):
            _check(gathered, round, lengths)
        np.testing.assert_array_equal(mine, _message(peer.rank, round, lengths[peer.rank]))
    assert [message.size for message in lane.iallgather(*_buffers(peer, 0, 0)).wait()] == [0] * peer.size


def poll_a_gathering(peer: Peer) -> None:
    lane = peer.lane("a")
    request = lane.iallgather(_message(peer.rank, 0, peer.rank), np.empty((peer.size, 10), np.uint8))
    while not request.done():
        pass
    assert request.done()
    _check(request.result, 0, list(range(peer.size)))


def gather_while_others_are_under_way(peer: Peer) -> None:
    """Ranks look at the requests in another order, so their lengths are known to each at another time."""
    lane, total, word = peer.lane("a"), np.zeros(3), np.zeros(1)
    for round in range(10):
        gatherings = [lane.iallgather(*_buffers(peer, 2 * round, 3000))]
        word[:] = peer.rank
        others = [lane.iallreduce(np.ones(3), total), lane.ibroadcast(word, peer.size - 1)]
        gatherings.append(lane.iallgather(*_buffers(peer, 2 * round + 1, 20)))
        others.append(lane.ibarrier())
        requests = [*gatherings, *others]
        random.Random(f"{round} {peer.rank}").shuffle(requests)
        for request in requests:
            request.wait()
        _check_buffers(gatherings[0], peer, 2 * round, 3000)
        _check_buffers(gatherings[1], peer, 2 * round + 1, 20)
        assert (total == peer.size).all()
        assert word[0] == peer.size - 1


def gather_on_two_lanes(peer: Peer) -> None:
    lanes = [peer.lane("a"), peer.lane("b")]
    order = (0, 1) if peer.rank % 2 == 0 else (1, 0)
    requests = {number: lanes[number].iallgather(*_buffers(peer, number, 1000)) for number in order}
    for number in order:
        requests[number].wait()
    for number in order:
        _check_buffers(requests[number], peer, number, 1000)


def drop_a_gathering(peer: Peer) -> None:
    """The last rank drops its request at once; the others get its message, though it waits elsewhere."""
    lane, other = peer.lane("a"), peer.lane("b")
    request: Request[list[Array]] | None = lane.iallgather(*_buffers(peer, 0, 500))
    if peer.rank == peer.size - 1 > 0:
        request = None
        gc.collect()
    if request is not None:
        request.wait()
        _check_buffers(request, peer, 0, 500)
    other.ibarrier().wait()


def mix_at_random(peer: Peer, seed: int, num_calls: int) -> None:
    """Call collectives of all kinds on two lanes; only the order on each lane is the same on all ranks."""
    lanes = [peer.lane("a"), peer.lane("b")]
    plan = random.Random(seed)
    kinds = ("gather", "sum", "barrier", "gather")
    calls = [[(plan.choice(kinds), round, plan.randrange(2000)) for round in range(num_calls)] for _ in lanes]
    own = random.Random(f"{seed} {peer.rank}")
    pending: list[tuple[Request, str, int, int]] = []
    while any(calls):
        number = own.choice([number for number in range(2) if calls[number]])
        kind, round, count = calls[number].pop(0)
        pending.append((_call(lanes[number], kind, peer, round, count), kind, round, count))
        peer.clock.elapse(own.choice([0, 0, 1e-6, 1e-4]))
        if own.random() < 0.5:
            own.choice(pending)[0].done()
    own.shuffle(pending)
    for request, kind, round, count in pending:
        request.wait()
        if kind == "gather":
            _check_buffers(request, peer, round, count)


def gather_too_much(peer: Peer) -> str:
    """Return the refusal; nothing is under way afterwards."""
    lane = peer.lane("narrow lane")
    receive = np.zeros((peer.size, 8), np.uint8)
    try:
        lane.iallgather(np.zeros(9, np.uint8), receive)
    except TransportError as error:
        refusal = str(error)
    else:
        raise AssertionError("a message that is too long was gathered")
    gathered = lane.iallgather(np.full(8, peer.rank, np.uint8), receive).wait()
    np.testing.assert_array_equal(np.stack(gathered), np.arange(peer.size)[:, None].repeat(8, 1))
    return refusal


def _call(lane: Lane, kind: str, peer: Peer, round: int, count: int) -> Request:
    if kind == "gather":
        return lane.iallgather(*_buffers(peer, round, count))
    if kind == "sum":
        return lane.iallreduce(np.ones(count), np.zeros(count))
    return lane.ibarrier()


def _message(rank: int, round: int, nbytes: int) -> Array:
    return np.random.default_rng([rank, round]).integers(0, 256, nbytes, np.uint8)


def _length(rank: int, round: int, capacity: int) -> int:
    return random.Random(f"{rank} {round}").randint(0, capacity)


def _buffers(peer: Peer, round: int, capacity: int) -> tuple[Array, Array]:
    mine = _message(peer.rank, round, _length(peer.rank, round, capacity))
    return mine, np.full((peer.size, capacity), 255, np.uint8)


def _check(gathered: list[Array], round: int, lengths: list[int]) -> None:
    assert len(gathered) == len(lengths)
    for rank, message in enumerate(gathered):
        np.testing.assert_array_equal(message, _message(rank, round, lengths[rank]))


def _check_buffers(request: Request, peer: Peer, round: int, capacity: int) -> None:
    _check(
        cast(list[Array], request.result),
        round,
        [_length(rank, round, capacity) for rank in range(peer.size)],
    )
