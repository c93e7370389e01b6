"""The paper's figure 6 on fair random, exponential and unfair graphs, where it is so and where not."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.topology import Exponential
from hocket.topology.analysis import analyse
from hocket_crossover import FairRandom, Unfair


@pytest.mark.parametrize("hops", [3, 4, 5, 6])
def test_fair_random_mixes_faster_in_early_rounds(hops: int) -> None:
    """For 8 to 64 ranks lambda2 is below the exponential graph's from k = 2 to log2 n - 1, in the mean over draws."""
    size = 2**hops
    fair = analyse(FairRandom(), size, hops, draws=60)
    exponential = analyse(Exponential(), size, hops)
    assert (fair.second_eigenvalue[1:-1] < exponential.second_eigenvalue[1:-1]).all()
    # Not in the first round, and not any more when the exponential graph has averaged exactly.
    assert fair.second_eigenvalue[0] > exponential.second_eigenvalue[0]
    assert exponential.second_eigenvalue[-1] < 1e-6 < fair.second_eigenvalue[-1]


def test_32_ranks_in_numbers() -> None:
    """lambda2 for k = 1 to 5 as computed when the paper was read; a spread of 60 draws is about 0.03."""
    fair = analyse(FairRandom(), 32, 5, draws=60)
    exponential = analyse(Exponential(), 32, 5)
    np.testing.assert_allclose(fair.second_eigenvalue, [1.0, 0.722, 0.480, 0.318, 0.208], atol=0.02)
    np.testing.assert_allclose(exponential.second_eigenvalue, [0.995, 0.976, 0.902, 0.638, 0], atol=1e-3)


def test_what_is_left_of_differences_is_more_than_lambda2_says() -> None:
    """Random products are not normal: ||M - J||_2 is above lambda2 in each round after the first."""
    fair = analyse(FairRandom(), 32, 8)
    assert (fair.deviation[1:] > fair.second_eigenvalue[1:] + 0.03).all()


@pytest.mark.parametrize("size", [5, 8, 16, 33])
@pytest.mark.parametrize("distinct", [False, True])
def test_imbalance_vanishes_with_fairness_alone(size: int, distinct: bool) -> None:
    rounds = 40
    fair = analyse(FairRandom(), size, rounds, draws=20)
    unfair = analyse(Unfair(distinct=distinct), size, rounds, draws=20)
    assert fair.imbalance[-1] < 1e-9
    assert unfair.imbalance[-1] > 1e-4
    assert unfair.imbalance[-1] == pytest.approx(unfair.imbalance[rounds // 2], rel=0.01), (
        "it stays where it is"
    )
    assert unfair.deviation[-1] > 0.3
    # Unfair ranks agree with each other all the same, on something else than their mean.
    assert unfair.second_eigenvalue[-1] < 1e-4
