"""Core's topologies against the contract, and against what their papers say of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.testing.topology import Irregular, TopologyConformance
from hocket.topology import Complete, Exponential, Neighbours, Peers, RandomMatching, Ring, Topology


class TestComplete(TopologyConformance):
    topologies = (Complete(),)


class TestRing(TopologyConformance):
    topologies = (Ring(),)


class TestExponential(TopologyConformance):
    topologies = (Exponential(), Exponential(Peers.ALL))


class TestRandomMatching(TopologyConformance):
    topologies = (RandomMatching(), RandomMatching(seed=2**64 - 1))


class TestIrregular(TopologyConformance):
    topologies = (Irregular(), Irregular(seed=3))


@dataclass(frozen=True)
class PowersOnly(Ring):
    def check_size(self, size: int) -> None:
        if size & (size - 1):
            raise ValueError(f"{size} ranks are no power of two: use 1, 2, 4, 8, ..., or topology ring")


class TestRefusing(TopologyConformance):
    topologies = (PowersOnly(),)
    refuses = tuple(size for size in range(1, 34) if size & (size - 1))


def test_ring_of_five_by_hand() -> None:
    third = 1 / 3
    expected = [
        [third, third, 0, 0, third],
        [third, third, third, 0, 0],
        [0, third, third, third, 0],
        [0, 0, third, third, third],
        [third, 0, 0, third, third],
    ]
    np.testing.assert_array_equal(Ring().mixing_matrix(5, 7, 3), expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_rings_give_the_mean_at_once(size: int) -> None:
    np.testing.assert_allclose(Ring().mixing_matrix(size, 0, 0), 1 / size)


@pytest.mark.parametrize("size", range(4, 34))
def test_ring_mixes_as_its_formula_says(size: int) -> None:
    eigenvalues = np.linalg.eigvalsh(Ring().mixing_matrix(size, 0, 0))
    assert eigenvalues[-2] == pytest.approx(1 / 3 + 2 / 3 * np.cos(2 * np.pi / size))


def test_exponential_of_six_by_hand() -> None:
    rounds = [Exponential().neighbours(4, 6, round, 0) for round in range(4)]
    assert [neighbours.send_to for neighbours in rounds] == [(5,), (0,), (2,), (5,)]
    assert [neighbours.receive_from for neighbours in rounds] == [(3,), (2,), (0,), (3,)]
    assert {neighbours.self_weight for neighbours in rounds} == {0.5}
    every = Exponential(Peers.ALL).neighbours(4, 6, 0, 0)
    assert (every.send_to, every.receive_from) == ((5, 0, 2), (3, 2, 0))
    assert every.send_weights == (0.25,) * 3


@pytest.mark.parametrize("exponent", range(1, 6))
def test_exponential_gives_the_mean_after_log2_rounds(exponent: int) -> None:
    size = 2**exponent
    product = np.eye(size)
    for round in range(exponent):
        product = Exponential().mixing_matrix(size, 5 * exponent + round, 0) @ product
    np.testing.assert_array_equal(product, np.full((size, size), 1 / size))


def test_exponential_eigenvalues_are_those_of_the_paper_page() -> None:
    """n = 32, k = 1..5 rounds: the figures of `crossover-sgd.md`."""
    product, moduli = np.eye(32), []
    for round in range(5):
        product = Exponential().mixing_matrix(32, round, 0) @ product
        moduli.append(np.sort(np.abs(np.linalg.eigvals(product)))[-2])
    np.testing.assert_allclose(moduli, [0.995, 0.976, 0.902, 0.638, 0], atol=1e-3)


@given(st.integers(1, 33), st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 1000))
def test_matching_is_a_symmetric_projection(size: int, seed: int, round: int, segment: int) -> None:
    matrix = RandomMatching(seed).mixing_matrix(size, round, segment)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(matrix @ matrix, matrix)
    assert np.count_nonzero(np.diag(matrix) == 1) == size % 2


def matching(topology: Topology, size: int, round: int, segment: int) -> frozenset[tuple[int, ...]]:
    matrix = topology.mixing_matrix(size, round, segment)
    return frozenset(tuple(np.flatnonzero(row).tolist()) for row in matrix)


@pytest.mark.parametrize(("size", "num_matchings"), [(3, 3), (4, 3), (5, 15), (6, 15)])
@pytest.mark.parametrize("by", ["round", "segment", "seed"])
def test_matchings_are_uniform(size: int, num_matchings: int, by: str) -> None:
    """Each matching within 5 standard deviations of its share, over rounds, segments and seeds alike."""
    num_draws = 1500
    if by == "seed":
        drawn = Counter(matching(RandomMatching(seed), size, 0, 0) for seed in range(num_draws))
    elif by == "round":
        drawn = Counter(matching(RandomMatching(), size, round, 0) for round in range(num_draws))
    else:
        drawn = Counter(matching(RandomMatching(), size, 0, segment) for segment in range(num_draws))
    assert len(drawn) == num_matchings
    share = 1 / num_matchings
    limit = 5 * np.sqrt(num_draws * share * (1 - share))
    assert max(abs(count - num_draws * share) for count in drawn.values()) < limit


def test_matchings_never_change() -> None:
    """These may never change: a run that is resumed, on another machine too, needs them."""
    drawn = [sorted(matching(RandomMatching(seed=5), 6, round, 2)) for round in range(3)]
    assert drawn == [[(0, 4), (1, 3), (2, 5)], [(0, 1), (2, 5), (3, 4)], [(0, 1), (2, 3), (4, 5)]]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(ValueError, match=r"seed is -?\d+; allowed: 0 to"):
        RandomMatching(seed)


@given(st.integers(2, 17), st.integers(0, 100))
def test_push_sum_over_the_irregular_graph_reaches_the_mean(size: int, seed: int) -> None:
    value, weight = np.arange(size, dtype=np.float64), np.ones(size)
    mean = value.mean()
    for round in range(60):
        matrix = Irregular(seed).mixing_matrix(size, round, 0)
        value, weight = matrix @ value, matrix @ weight
        assert weight.sum() == pytest.approx(size)
    np.testing.assert_allclose(value / weight, mean, rtol=1e-6)


@dataclass(frozen=True)
class Selfish(Ring):
    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        return Neighbours((rank,), (0.5,), (rank,), 0.5)


@dataclass(frozen=True)
class OneSided(Ring):
    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        return Neighbours(((rank + 1) % size,), (0.5,), ((rank + 1) % size,), 0.5) if size > 1 else ALONE


@dataclass(frozen=True)
class Impure(Ring):
    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        return Exponential().neighbours(rank, size, int(np.random.randint(9)), segment)


@dataclass(frozen=True)
class Undeclared(Irregular):
    rows_sum_to_one: ClassVar[bool] = True


@dataclass(frozen=True)
class Transposed(Irregular):
    rows_sum_to_one: ClassVar[bool] = True
    columns_sum_to_one: ClassVar[bool] = False


@dataclass(frozen=True)
class ModestInRows(Ring):
    rows_sum_to_one: ClassVar[bool] = False


@dataclass(frozen=True)
class ModestInColumns(Ring):
    columns_sum_to_one: ClassVar[bool] = False


@dataclass(frozen=True)
class OtherMatrix(Ring):
    def mixing_matrix(self, size: int, round: int, segment: int) -> np.ndarray:
        return np.full((size, size), 1 / size)


@dataclass(frozen=True)
class Unexplained(Ring):
    def check_size(self, size: int) -> None:
        if size == 5:
            raise ValueError("no")


ALONE = Neighbours((), (), (), 1.0)


@pytest.mark.parametrize(
    ("topology", "test"),
    [
        (Selfish(), "test_sends_and_receives_match"),
        (OneSided(), "test_sends_and_receives_match"),
        (Impure(), "test_pure"),
        (Undeclared(), "test_weights_are_as_declared"),
        (Transposed(), "test_weights_are_as_declared"),
        (ModestInRows(), "test_sums_that_are_one_are_declared"),
        (ModestInColumns(), "test_sums_that_are_one_are_declared"),
        (OtherMatrix(), "test_mixing_matrix_is_what_the_ranks_do"),
        (Unexplained(), "test_refused_sizes_come_with_a_reason"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_suite_fails_for_what_breaks_the_contract(topology: Topology, test: str) -> None:
    suite = TopologyConformance()
    suite.sizes = tuple(range(1, 8))  # type: ignore[misc]  # hypothesis looks for the simplest failure
    suite.refuses = (5,) if isinstance(topology, Unexplained) else ()  # type: ignore[misc]
    with pytest.raises(AssertionError) as told:
        getattr(suite, test)(topology=topology)
    if isinstance(topology, OneSided):
        where = r"size 3, round \d+, segment \d+: rank 0 of 3 has 1 in receive_from, and rank 1 has send_to=\(2,\)"
        assert re.search(where, str(told.value))
    suite.refuses = ()  # type: ignore[misc]
    getattr(suite, test)(topology=Ring())
