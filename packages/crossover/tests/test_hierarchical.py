"""Hierarchical Crossover-SGD: against its definition, and equal to what it contains at both of its ends."""

from __future__ import annotations

import numpy as np
import pytest
from replicas import averaged, on_ranks, train

import hocket
from hocket.strategy import Strategy
from hocket_crossover import FairRandom

SIZE = 8


def hierarchical(*, size: int | None = None, count: int | None = None, sharded: bool = True) -> Strategy:
    over = f"{{size: {size or 'null'}, count: {count or 'null'}, sharded: {str(sharded).lower()}}}"
    return hocket.compose("crossover.hierarchical", f"gradients.0.over={over}")


@pytest.mark.one_of_each
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("group", [2, 4])
def test_groups_step_together_and_their_leaders_mix(
    group: int, sharded: bool, max_norm: float | None
) -> None:
    strategy = hierarchical(size=group, sharded=sharded)
    ended = on_ranks(SIZE, lambda: train(strategy, max_norm=max_norm))
    expected = averaged(SIZE // group, FairRandom(), group=group, max_norm=max_norm)
    np.testing.assert_allclose(ended, np.repeat(expected, group, axis=0), rtol=2e-5, atol=2e-6)


@pytest.mark.one_of_each
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("group", [2, 4])
def test_one_leader_and_shares_are_the_same_to_the_bit(group: int, max_norm: float | None) -> None:
    one, shares = hierarchical(size=group, sharded=False), hierarchical(size=group, sharded=True)
    np.testing.assert_array_equal(
        on_ranks(SIZE, lambda: train(one, max_norm=max_norm)),
        on_ranks(SIZE, lambda: train(shares, max_norm=max_norm)),
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_one_group_is_sgd_over_it(sharded: bool) -> None:
    ended = on_ranks(SIZE, lambda: train(hierarchical(count=1, sharded=sharded)))
    hierarchical_sgd = on_ranks(SIZE, lambda: train(hocket.compose("hierarchical_sgd")))
    sgd = on_ranks(SIZE, lambda: train(hocket.compose("sgd")))
    np.testing.assert_array_equal(ended, hierarchical_sgd)
    np.testing.assert_array_equal(ended, sgd)


@pytest.mark.parametrize("sharded", [False, True])
def test_groups_of_one_are_crossover(sharded: bool) -> None:
    ended = on_ranks(SIZE, lambda: train(hierarchical(size=1, sharded=sharded)))
    crossover = on_ranks(SIZE, lambda: train(hocket.compose("crossover")))
    np.testing.assert_array_equal(ended, crossover)


def test_ranks_of_a_host_can_be_a_group() -> None:
    """Virtual ranks are on one host, so that they all are one group."""
    strategy = hocket.compose("crossover.hierarchical", "gradients.0.over={size: null, by: host}")
    ended = on_ranks(4, lambda: train(strategy))
    np.testing.assert_array_equal(ended, on_ranks(4, lambda: train(hocket.compose("sgd"))))
