"""A solo allreduce on virtual ranks, with random delays: the contract of partial collectives (eager-SGD, Lemma 6.1)."""

from __future__ import annotations

import numpy as np
import pytest
from bodies import ALLREDUCES, check_solo, solo_rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from solo import Solo

from hocket.progress import ThreadProgress
from hocket.transport.virtual import World, current_peer


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    rounds=st.integers(1, 12),
    count=st.integers(0, 5),
    allreduce=st.sampled_from(sorted(ALLREDUCES)),
    slow=st.sampled_from([1.0, 10.0, 100.0]),
)
def test_sums_are_equal_and_nothing_is_lost(
    size: int, seed: int, rounds: int, count: int, allreduce: str, slow: float
) -> None:
    world = World(size, seed=seed)
    told = world.run(lambda: solo_rounds(current_peer(), seed, rounds, count, allreduce, slow))
    check_solo(told, rounds)


def test_a_slow_rank_is_pulled_through_rounds_and_holds_nobody_up() -> None:
    def body() -> tuple[float, list[int], int]:
        peer = current_peer()
        progress = ThreadProgress()
        solo = Solo(peer, progress, 1)
        if peer.rank == 2:
            peer.clock.elapse(1.0)
        newest = [solo(np.ones(1), round)[0] for round in range(10)]
        after_s = peer.clock.now()
        progress.close()
        return after_s, newest, len([taken for taken in solo.taken if taken.any()])

    fast, _, slow, _ = World(4).run(body)
    assert fast[0] < 0.01
    assert fast[1] == list(range(10))
    assert slow[1] == [9] * 10  # the newest, though it asks for older ones
    assert slow[2] == 0  # all rounds had been before it came
    assert slow[0] >= 1.0


def test_several_initiators_start_one_round() -> None:
    def body() -> list[float]:
        peer = current_peer()
        progress = ThreadProgress()
        solo = Solo(peer, progress, 1)
        for round in range(5):
            peer.clock.elapse(1e-3)  # all arrive at the same moment
            assert solo(np.ones(1), round) == (round, [8.0])
        progress.close()
        return [float(result[0]) for result in solo.results]

    assert World(8).run(body) == [[8.0] * 5] * 8


def test_who_closes_first_goes_on_answering() -> None:
    def body() -> float:
        peer = current_peer()
        progress = ThreadProgress()
        solo = Solo(peer, progress, 3)
        for round in range(5 if peer.rank == 0 else 1):
            peer.clock.elapse(0.1)
            solo(np.ones(3), round)
        progress.close()
        assert solo.num_rounds == 5
        return peer.clock.now()

    assert min(World(3).run(body)) > 0.5


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    def run() -> tuple[list[object], float]:
        world = World(5, seed=seed)
        return world.run(lambda: solo_rounds(current_peer(), seed, 6, 2, "ring", 10.0)), world.elapsed_s

    assert run() == run()
