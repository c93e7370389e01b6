"""The ranks' part of tests of messages.

Rank r's right neighbour is r + 1, its left one r - 1; alone it is its own neighbour.
"""

from __future__ import annotations

import gc
import random

import numpy as np

from hocket.arrays import Array
from hocket.errors import ExchangeTimeoutError, TransportError
from hocket.testing.transport.peers import neighbours
from hocket.transport.peer import Peer
from hocket.transport.request import Request

_DTYPES = ("float32", "float64", "int32", "int64", "uint8")


def receive_in_another_order(peer: Peer) -> None:
    lane, rounds = peer.lane("a"), range(5)
    received = {(source, round): np.zeros(3) for source in range(peer.size) for round in rounds}
    sends = [
        lane.isend(_stamp(peer.rank, to, round), to, round) for round in rounds for to in range(peer.size)
    ]
    receives = [lane.irecv(received[key], *key) for key in sorted(received, reverse=True)]
    for request in [*receives, *sends]:
        assert request.wait() is None
    for (source, round), data in received.items():
        np.testing.assert_array_equal(data, _stamp(source, peer.rank, round))


def exchange_with_neighbours(peer: Peer) -> None:
    """Grouped: with both neighbours, with nobody, and against the messages of another rank that groups none."""
    left, right = neighbours(peer)
    lane = peer.lane("a")
    for round in range(4):
        received = [np.zeros(3), np.zeros(3)]
        sends = [(_stamp(peer.rank, to, round), to) for to in (left, right)]
        receives = [*zip(received, (right, left), strict=True)]
        if round == 3 and peer.rank == 0:
            for request in [lane.irecv(*receive, round) for receive in receives] + [
                lane.isend(*send, round) for send in sends
            ]:
                request.wait()
        else:
            request = lane.iexchange(sends, receives, round)
            while round == 1 and not request.done():
                pass
            if round == 2:
                request.wait()
            request.wait()
        for data, source in receives:
            np.testing.assert_array_equal(data, _stamp(source, peer.rank, round))
    lane.iexchange([], [], 4).wait()


def receive_on_another_lane_first(peer: Peer) -> None:
    left, right = neighbours(peer)
    lanes = [peer.lane("a"), peer.lane("b")]
    received = [np.zeros(3), np.zeros(3)]
    sends = [lane.isend(_stamp(number, 0, 0), right, 0) for number, lane in enumerate(lanes)]
    for number in (1, 0):
        lanes[number].irecv(received[number], left, 0).wait()
        np.testing.assert_array_equal(received[number], _stamp(number, 0, 0))
    for send in sends:
        send.wait()


def send_one_round_often(peer: Peer) -> None:
    left, right = neighbours(peer)
    lane = peer.lane("a")
    counts = [7, 0, 100_000, 1, 7]  # a small message must not overtake a large one
    sends = [lane.isend(np.full(count, number), right, 3) for number, count in enumerate(counts)]
    received = [np.zeros(count, np.int64) for count in counts]
    for request in [lane.irecv(data, left, 3) for data in received] + sends:
        request.wait()
    for number, data in enumerate(received):
        assert (data == number).all()


def send_sizes(peer: Peer, counts: list[int]) -> None:
    left, right = neighbours(peer)
    lane = peer.lane("a")
    for round, count in enumerate(counts):
        for dtype in _DTYPES:
            received = np.zeros(count, dtype)
            receive = lane.irecv(received, left, round)
            send = lane.isend(np.arange(count).astype(dtype), right, round)
            receive.wait()
            send.wait()
            np.testing.assert_array_equal(received, np.arange(count).astype(dtype))


def change_what_was_sent(peer: Peer) -> None:
    left, right = neighbours(peer)
    lane = peer.lane("a")
    data, received = np.arange(500), np.zeros(500, np.int64)
    receive = lane.irecv(received, left, 0)
    lane.isend(data, right, 0).wait()
    data[:] = -1
    receive.wait()
    np.testing.assert_array_equal(received, np.arange(500))


def poll_until_done(peer: Peer) -> None:
    left, right = neighbours(peer)
    lane = peer.lane("a")
    received = np.zeros(3)
    requests = [lane.irecv(received, left, 0), lane.isend(np.ones(3), right, 0), lane.ibarrier()]
    while not _poll(requests):
        pass
    assert _poll(requests)
    assert received.sum() == 3


def exchange_at_random(peer: Peer, seed: int, num_messages: int) -> int:
    """Return how many messages this rank received; all ranks draw the same plan."""
    plan = random.Random(seed)
    lanes = [peer.lane("a"), peer.lane("b")]
    messages = [
        (plan.randrange(peer.size), plan.randrange(peer.size), plan.randrange(2), round, plan.randrange(3000))
        for round in range(num_messages)
    ]
    own = random.Random(f"{seed} {peer.rank}")
    own.shuffle(messages)
    pending, expected = [], []
    for source, to, lane, round, nbytes in messages:
        if source == peer.rank:
            pending.append(lanes[lane].isend(np.full(nbytes, round, np.uint8), to, round))
        if to == peer.rank:
            expected.append((np.zeros(nbytes, np.uint8), round))
            pending.append(lanes[lane].irecv(expected[-1][0], source, round))
        if pending and own.random() < 0.5:
            pending[own.randrange(len(pending))].done()
        peer.clock.elapse(own.choice([0, 0, 1e-6, 1e-4]))
    for request in pending:
        request.wait()
    for data, round in expected:
        assert (data == round).all()
    return len(expected)


def drop_requests(peer: Peer) -> None:
    left, right = neighbours(peer)
    lane, other = peer.lane("a"), peer.lane("b")
    received, total = np.zeros(1000), np.zeros(1000)
    lane.irecv(received, left, 0)
    lane.isend(np.full(1000, 1.0), right, 0)
    lane.iallreduce(np.full(1000, 1.0), total)
    gc.collect()
    for _ in range(1000):
        num_finished = np.zeros(1)
        # An allreduce under way may have left a part of the sum in `total`.
        finished = np.array([float(received.all() and (total == peer.size).all())])
        other.iallreduce(finished, num_finished).wait()
        if num_finished[0] == peer.size:
            break
    np.testing.assert_array_equal(received, np.full(1000, 1.0))
    np.testing.assert_array_equal(total, np.full(1000, float(peer.size)))


def wait_too_long(peer: Peer) -> str:
    """Return the error of a wait for what is sent only later."""
    left, right = neighbours(peer)
    lane, received = peer.lane("slow lane"), np.zeros(1)
    receive = lane.irecv(received, right, 0)
    try:
        receive.wait(0.05)
    except ExchangeTimeoutError as error:
        message = str(error)
    else:
        raise AssertionError("a wait for a message that nobody had sent came to an end")
    peer.allgather_bytes(b"")  # so that nobody sends before all have given up
    send = lane.isend(np.ones(1), left, 0)
    receive.wait()
    send.wait()
    assert received[0] == 1
    return message


def receive_another_size(peer: Peer, sent: int, expected: int) -> str:
    """Return the error of a rank that gets a message of another size than it expects; empty on the others."""
    lane = peer.lane("sizes")
    text = ""
    if peer.rank == 0:
        lane.isend(np.zeros(sent, np.uint8), 1, 4).wait()
    elif peer.rank == 1:
        try:
            lane.irecv(np.zeros(expected, np.uint8), 0, 4).wait()
        except TransportError as error:
            text = str(error)
    peer.allgather_bytes(b"")
    return text


def _poll(requests: list[Request]) -> bool:
    """Return whether all are done, having polled each."""
    states = [request.done() for request in requests]
    return all(states)


def _stamp(source: int, to: int, round: int) -> Array:
    return np.array([source, to, round], dtype=np.float64)
