"""Partial sums in shared memory, whose ranks are moved step by step here: any interleaving of arrivals."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.arrays import Array
from hocket.errors import ExchangeTimeoutError, PeerLostError
from hocket.transport.host.sync import MUTEX_BYTES, OwnerDiedError, RobustMutex, is_available
from hocket.transport.reduction import tree_sum
from hocket.transport.single import SinglePeer
from hocket_eager import Delivery, Quorum, QuorumRules
from hocket_eager.host.layout import RankPart, Table, TableLayout
from hocket_eager.host.shared_sum import SharedSum

pytestmark = pytest.mark.skipif(not is_available(), reason="no robust mutexes and futexes here")

NUMEL, FLOAT32 = 5, np.dtype(np.float32)


class OneOfSeveral(SinglePeer):
    """A peer that knows its place, for ranks that are all in this process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.timeout_s = 0.3


def opened(rules: QuorumRules, missed: Delivery) -> list[SharedSum]:
    sums = missed is Delivery.SUM
    nbytes = Table.nbytes(rules.size) + RankPart.nbytes(NUMEL, FLOAT32, sums)
    memory = [np.zeros(nbytes + 64, np.uint8) for _ in range(rules.size)]
    aligned = [of_rank[-of_rank.ctypes.data % 64 :][:nbytes] for of_rank in memory]
    layouts = [TableLayout(rank, aligned, NUMEL, FLOAT32, sums) for rank in range(rules.size)]
    return [
        SharedSum(OneOfSeveral(rank, rules.size), "tested", layout, rules, missed)
        for rank, layout in enumerate(layouts)
    ]


def gradient(rank: int, step: int) -> Array:
    return np.random.default_rng([rank, step]).standard_normal(NUMEL).astype(np.float32)


@settings(max_examples=200 if os.environ.get("HOCKET_CELLS") == "all" else 80, derandomize=True)
@given(
    size=st.integers(2, 6),
    order=st.lists(st.integers(0, 5), max_size=60),
    candidates=st.integers(1, 6),
    starts=st.sampled_from(Quorum),
    missed=st.sampled_from(Delivery),
    staleness=st.one_of(st.none(), st.integers(0, 3)),
)
def test_any_order_of_arrivals(
    size: int, order: list[int], candidates: int, starts: Quorum, missed: Delivery, staleness: int | None
) -> None:
    """Against a plain computation, to the bit."""
    rules = QuorumRules(size, min(candidates, size), starts, staleness)
    ranks = opened(rules, missed)
    arrived = np.zeros(size, np.int64)
    waiting: list[Array | None] = [None] * size
    results: list[Array] = []
    handed = [0] * size
    for rank in (number % size for number in order):
        step = int(arrived[rank])
        if step > len(results):
            continue  # still waits for the round before
        data = gradient(rank, step)
        ranks[rank].propose(data, step)
        waiting[rank] = data.copy() if waiting[rank] is None else waiting[rank] + data
        arrived[rank] += 1
        if rules.may_start(len(results), arrived):
            results.append(tree_sum([data for data in waiting if data is not None]))
            waiting = [None] * size
        for one in ranks:
            assert one.ended(len(results) - 1) or not results
            assert not one.ended(len(results))
        if len(results) > step:
            out = np.empty(NUMEL, np.float32)
            outcome = ranks[rank].fetch(step, out)
            assert outcome.round == len(results) - 1
            if missed is Delivery.NEWEST:
                expected = results[-1]
            else:
                expected = np.zeros(NUMEL, np.float32)
                for result in results[handed[rank] :]:
                    expected = expected + result
            handed[rank] = len(results)
            assert out.tobytes() == (expected + np.float32(0)).tobytes() or np.array_equal(out, expected)
    for rank, one in enumerate(ranks):
        _, left = one.left()
        expected_left = np.zeros(NUMEL, np.float32) if waiting[rank] is None else waiting[rank]
        np.testing.assert_array_equal(left, expected_left)


def test_a_wait_says_who_is_missing() -> None:
    ranks = opened(QuorumRules(3, 3, Quorum.LAST), Delivery.NEWEST)
    ranks[1].propose(gradient(1, 0), 0)
    with pytest.raises(ExchangeTimeoutError, match="round 0 of tested, which needs rank 0 and 2 first"):
        ranks[1].wait(0)


def test_a_wait_ends_when_another_thread_ends_the_round() -> None:
    ranks = opened(QuorumRules(2, 2, Quorum.LAST), Delivery.NEWEST)
    ranks[0].propose(gradient(0, 0), 0)
    other = threading.Timer(0.05, lambda: ranks[1].propose(gradient(1, 0), 0))
    other.start()
    ranks[0].wait(0)
    other.join()
    assert ranks[0].ended(0)


def test_a_lock_that_another_holds_too_long() -> None:
    ranks = opened(QuorumRules(2, 2, Quorum.FIRST), Delivery.NEWEST)
    held, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with ranks[1]._holding_own:
            held.set()
            enough.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with pytest.raises(ExchangeTimeoutError, match="tested, which rank 1 holds in shared memory"):
        ranks[0].propose(gradient(0, 0), 0)
    enough.set()
    holder.join()


def test_a_mutex_whose_holder_has_died() -> None:
    """The next to come is told at once, and so is everybody after."""
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)[:MUTEX_BYTES]
    mutex = RobustMutex(memory)
    mutex.initialise()

    def die() -> None:
        mutex.acquire(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join()
    for _ in range(2):
        with pytest.raises(OwnerDiedError):
            mutex.acquire(1.0)


def test_a_lost_lock_is_told_with_its_round() -> None:
    ranks = opened(QuorumRules(2, 2, Quorum.FIRST), Delivery.NEWEST)

    class Lost:
        def acquire(self, longest_s: float) -> bool:
            raise OwnerDiedError

    ranks[0].propose(gradient(0, 0), 0)
    ranks[0]._own.mutex = Lost()  # type: ignore[assignment]
    ranks[0]._own.holder[0] = 1
    with pytest.raises(
        PeerLostError, match="tested, round 1: rank 1 has died while it worked in shared memory"
    ):
        ranks[0].propose(gradient(0, 1), 1)
