"""The unfair topology: the contract, uniform draws, and for COMBO the peers of a round."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.testing.topology import TopologyConformance
from hocket_crossover import Unfair


class TestUnfair(TopologyConformance):
    topologies = (Unfair(), Unfair(seed=7), Unfair(distinct=True))


def sources(topology: Unfair, size: int, round: int, segment: int) -> list[int]:
    return [topology.neighbours(rank, size, round, segment).receive_from[0] for rank in range(size)]


def test_every_rank_keeps_half_and_hears_from_one() -> None:
    matrix = Unfair().mixing_matrix(12, 4, 2)
    np.testing.assert_array_equal(matrix.diagonal(), 0.5)
    np.testing.assert_array_equal(matrix.sum(axis=1), 1.0)
    assert (matrix.sum(axis=0) == 0.5).any(), "somebody is heard by nobody: 0.63 of the time for each rank"


@pytest.mark.parametrize("distinct", [False, True])
def test_every_rank_is_drawn_equally_often(distinct: bool) -> None:
    size, rounds = 6, 3000
    counts = np.zeros((size, size))
    for round in range(rounds):
        for rank, source in enumerate(sources(Unfair(1, distinct), size, round, 3)):
            counts[rank, source] += 1
    assert not counts.diagonal().any()
    expected = rounds / (size - 1)
    chi_square = ((counts[~np.eye(size, dtype=bool)] - expected) ** 2 / expected).sum()
    degrees = size * (size - 2)
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


def test_distinct_peers_are_all_others_before_any_comes_again() -> None:
    drawn = np.array([sources(Unfair(2, distinct=True), 8, 5, segment) for segment in range(14)])
    for rank in range(8):
        assert sorted(drawn[:7, rank]) == [other for other in range(8) if other != rank]
    np.testing.assert_array_equal(drawn[:7], drawn[7:])
    assert len({tuple(row) for row in drawn[:7].T}) == 8, "each rank has an order of its own"
