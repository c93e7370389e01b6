"""The contract of `hocket.transport.peer` as tests: what every transport passes, on every number of ranks.

A transport's tests are a subclass of `TransportConformance` with a `run` method. What the ranks do are
functions of this module, so that a rank in another process can import them by name; their arguments and
results are JSON.
"""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from hocket.errors import ExchangeTimeoutError
from hocket.transport.peer import Array, Peer, Request

__all__ = ["TransportConformance"]

_DTYPES = ("float32", "float64", "int32", "int64")


class TransportConformance(ABC):
    """Subclass it, name the subclass `Test...`, and say how a body is run.

    Attributes:
        sizes: the numbers of ranks that every test is run with.
    """

    sizes: tuple[int, ...] = (1, 2, 3, 4, 7)

    @abstractmethod
    def run(self, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `body(peer, *args)` on `size` ranks.

        Args:
            size: how many ranks.
            body: a function of this module, or of the module of a test of your own.
            args: JSON values.

        Returns:
            What the ranks returned, by rank: JSON values.

        Raises:
            Exception: a rank raised; whatever the transport makes of that.
        """

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes)

    def test_ranks_are_numbered(self, size: int) -> None:
        assert self.run(size, rank_and_size) == [[rank, size] for rank in range(size)]

    def test_receives_match_by_source_and_round(self, size: int) -> None:
        self.run(size, receive_in_another_order)

    def test_lanes_are_apart(self, size: int) -> None:
        self.run(size, receive_on_another_lane_first)

    def test_one_round_keeps_the_order_of_sends(self, size: int) -> None:
        self.run(size, send_one_round_often)

    def test_messages_of_any_size(self, size: int) -> None:
        self.run(size, send_sizes, [0, 1, 1000, 1_000_003])

    def test_sent_buffers_may_be_changed(self, size: int) -> None:
        self.run(size, change_what_was_sent)

    def test_polling_finishes_a_request(self, size: int) -> None:
        self.run(size, poll_until_done)

    def test_random_traffic(self, size: int) -> None:
        self.run(size, exchange_at_random, 11, 40)

    def test_dropped_requests_are_carried_out(self, size: int) -> None:
        self.run(size, drop_requests)

    def test_allreduce_sums(self, size: int) -> None:
        for dtype in _DTYPES:
            self.run(size, allreduce_against_numpy, dtype, [0, 1, 7, 1000, 100_003])

    def test_collectives_on_two_lanes_may_be_called_in_another_order(self, size: int) -> None:
        self.run(size, allreduce_on_two_lanes)

    def test_collectives_on_one_lane_match_by_order(self, size: int) -> None:
        self.run(size, allreduce_while_others_are_under_way)

    def test_broadcast_from_every_root(self, size: int) -> None:
        self.run(size, broadcast_from_everyone)

    def test_nobody_leaves_a_barrier_before_all_have_come(self, size: int) -> None:
        self.run(size, come_late_to_a_barrier)

    def test_allgather_bytes_of_different_lengths(self, size: int) -> None:
        expected = [[rank] * (3 * rank) for rank in range(size)]
        assert self.run(size, allgather_lengths) == [expected] * size

    def test_disjoint_groups_in_one_call(self, size: int) -> None:
        self.run(size, split_by_parity)

    def test_a_group_keeps_its_order_and_leaves_others_out(self, size: int) -> None:
        self.run(size, group_backwards)

    def test_groups_of_groups(self, size: int) -> None:
        self.run(size, halve_until_alone)

    def test_a_wait_ends_with_an_error_that_says_for_whom(self, size: int) -> None:
        for rank, message in enumerate(self.run(size, wait_too_long)):
            assert f"rank {rank}" in message
            assert "slow lane" in message
            if size > 1:
                assert f"rank {(rank + 1) % size}" in message

    def test_allocated_memory_is_aligned(self, size: int) -> None:
        self.run(size, allocate_sizes)

    def test_lanes_are_opened_and_closed_again(self, size: int) -> None:
        self.run(size, reopen_lanes)

    def test_clocks_do_not_go_back(self, size: int) -> None:
        self.run(size, look_at_the_clock)


# What the ranks do. Rank r's right neighbour is r + 1, its left one r - 1; alone it is its own neighbour.


def rank_and_size(peer: Peer) -> list[int]:
    lane = peer.lane("a")
    assert (lane.rank, lane.size, lane.name) == (peer.rank, peer.size, "a")
    return [peer.rank, peer.size]


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


def receive_on_another_lane_first(peer: Peer) -> None:
    left, right = _neighbours(peer)
    lanes = [peer.lane("a"), peer.lane("b")]
    received = [np.zeros(3), np.zeros(3)]
    sends = [lane.isend(_stamp(number, 0, 0), right, 0) for number, lane in enumerate(lanes)]
    for number in (1, 0):
        lanes[number].irecv(received[number], left, 0).wait()
        np.testing.assert_array_equal(received[number], _stamp(number, 0, 0))
    for send in sends:
        send.wait()


def send_one_round_often(peer: Peer) -> None:
    left, right = _neighbours(peer)
    lane = peer.lane("a")
    counts = [7, 0, 100_000, 1, 7]  # a small message must not overtake a large one
    sends = [lane.isend(np.full(count, number), right, 3) for number, count in enumerate(counts)]
    received = [np.zeros(count, np.int64) for count in counts]
    for request in [lane.irecv(data, left, 3) for data in received] + sends:
        request.wait()
    for number, data in enumerate(received):
        assert (data == number).all()


def send_sizes(peer: Peer, counts: list[int]) -> None:
    left, right = _neighbours(peer)
    lane = peer.lane("a")
    for round, count in enumerate(counts):
        for dtype in (*_DTYPES, "uint8"):
            received = np.zeros(count, dtype)
            receive = lane.irecv(received, left, round)
            send = lane.isend(np.arange(count).astype(dtype), right, round)
            receive.wait()
            send.wait()
            np.testing.assert_array_equal(received, np.arange(count).astype(dtype))


def change_what_was_sent(peer: Peer) -> None:
    left, right = _neighbours(peer)
    lane = peer.lane("a")
    data, received = np.arange(500), np.zeros(500, np.int64)
    receive = lane.irecv(received, left, 0)
    lane.isend(data, right, 0).wait()
    data[:] = -1
    receive.wait()
    np.testing.assert_array_equal(received, np.arange(500))


def poll_until_done(peer: Peer) -> None:
    left, right = _neighbours(peer)
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
        peer.elapse(own.choice([0, 0, 1e-6, 1e-4]))
    for request in pending:
        request.wait()
    for data, round in expected:
        assert (data == round).all()
    return len(expected)


def drop_requests(peer: Peer) -> None:
    left, right = _neighbours(peer)
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


def allreduce_against_numpy(peer: Peer, dtype: str, counts: list[int]) -> None:
    lane = peer.lane("a")
    for count in counts:
        sent = [_draw(dtype, count, rank) for rank in range(peer.size)]
        mine, total = sent[peer.rank].copy(), np.full(count, 99).astype(dtype)
        lane.iallreduce(mine, total).wait()
        np.testing.assert_array_equal(mine, sent[peer.rank])
        exact = np.sum(np.array(sent, "longdouble" if dtype.startswith("float") else dtype), axis=0)
        tolerance = peer.size * np.finfo(dtype).eps if dtype.startswith("float") else 0
        magnitude = np.sum(np.abs(np.array(sent, "float64")), axis=0)
        assert (np.abs(total - exact) <= tolerance * magnitude).all()
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


def allgather_lengths(peer: Peer) -> list[list[int]]:
    assert peer.allgather_bytes(b"") == [b""] * peer.size
    return [list(data) for data in peer.allgather_bytes(bytes([peer.rank]) * (3 * peer.rank), timeout_s=60)]


def split_by_parity(peer: Peer) -> None:
    ranks = range(peer.rank % 2, peer.size, 2)
    group = peer.group(ranks)
    assert group is not None
    assert (group.rank, group.size) == (peer.rank // 2, len(ranks))
    assert group.allgather_bytes(bytes([peer.rank])) == [bytes([rank]) for rank in ranks]
    lane, received, total = group.lane("a"), np.zeros(1), np.zeros(1)
    left, right = _neighbours(group)
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


def wait_too_long(peer: Peer) -> str:
    """Return the error of a wait for what is sent only later."""
    left, right = _neighbours(peer)
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


def allocate_sizes(peer: Peer) -> None:
    for nbytes in (0, 1, 63, 64, 100_001):
        memory = peer.allocate(nbytes)
        assert (memory.nbytes, memory.dtype) == (nbytes, np.uint8)
        assert nbytes == 0 or memory.ctypes.data % 64 == 0
        memory[:] = 7


def reopen_lanes(peer: Peer) -> None:
    left, right = _neighbours(peer)
    for number in range(10):
        lane, received = peer.lane("a"), np.zeros(1)
        receive, send = lane.irecv(received, left, 0), lane.isend(np.full(1, float(number)), right, 0)
        receive.wait()
        send.wait()
        assert received[0] == number
        lane.close()


def look_at_the_clock(peer: Peer) -> None:
    before = peer.now()
    peer.elapse(0.01)
    peer.report_progress(1)
    peer.lane("a").ibarrier().wait()
    assert peer.now() >= before
    assert isinstance(peer.describe_waiting(), str)


def _neighbours(peer: Peer) -> tuple[int, int]:
    return (peer.rank - 1) % peer.size, (peer.rank + 1) % peer.size


def _poll(requests: list[Request]) -> bool:
    """Return whether all are done, having polled each."""
    states = [request.done() for request in requests]
    return all(states)


def _stamp(source: int, to: int, round: int) -> Array:
    return np.array([source, to, round], dtype=np.float64)


def _draw(dtype: str, count: int, rank: int) -> Array:
    draw = np.random.default_rng([rank, count])
    if dtype.startswith("float"):
        return draw.standard_normal(count).astype(dtype)
    return draw.integers(-(2**20), 2**20, count).astype(dtype)
