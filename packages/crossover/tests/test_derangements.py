"""Derangements: always permutations without a fixed point, as likely as they should be, and fast to draw."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket_crossover import derangements

SEEDS = ADDRESSES = st.integers(0, 2**64 - 1)

GOLDEN_UNIFORM = [[4, 7, 0, 5, 8, 1, 2, 3, 6], [5, 7, 6, 0, 3, 8, 2, 1, 4]]
GOLDEN_ROULETTE = [[6, 0, 1, 4, 2, 3, 5], [2, 3, 6, 0, 5, 4, 1]]


def uniform(size: int, seed: int, round: int, segments: Sequence[int]) -> np.ndarray:
    return derangements.uniform(size, seed, [(round, segment) for segment in segments])


def roulette(table: np.ndarray, seed: int, round: int, segments: Sequence[int]) -> np.ndarray:
    return derangements.roulette(table, seed, [(round, segment) for segment in segments])


def assert_derangements(drawn: np.ndarray) -> None:
    ranks = np.arange(drawn.shape[1])
    np.testing.assert_array_equal(np.sort(drawn, axis=1), np.broadcast_to(ranks, drawn.shape))
    assert (drawn != ranks).all()


def uniform_table(size: int) -> np.ndarray:
    return np.ones((size, size)) - np.eye(size)


@given(st.integers(2, 257), SEEDS, ADDRESSES)
def test_a_permutation_without_a_fixed_point(size: int, seed: int, round: int) -> None:
    assert_derangements(uniform(size, seed, round, range(20)))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 16, 17, 129, 257])
def test_thousands_of_steps(size: int) -> None:
    for round in range(20):
        assert_derangements(uniform(size, 1, round, range(200)))


@given(st.integers(2, 33), SEEDS, ADDRESSES)
def test_the_roulette_comes_to_no_dead_end(size: int, seed: int, round: int) -> None:
    assert_derangements(roulette(uniform_table(size), seed, round, range(50)))


@given(st.integers(2, 80), SEEDS, st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9, unique=True))
def test_a_draw_depends_on_its_address_alone(size: int, seed: int, segments: list[int]) -> None:
    table = uniform_table(size)
    together = uniform(size, seed, 3, segments), roulette(table, seed, 3, segments)
    for place, segment in enumerate(segments):
        np.testing.assert_array_equal(uniform(size, seed, 3, [segment])[0], together[0][place])
        np.testing.assert_array_equal(roulette(table, seed, 3, [segment])[0], together[1][place])


def test_rounds_are_drawn_together_as_alone() -> None:
    places = [(round, segment) for round in (3, 4, 2**64 - 1) for segment in (0, 7)]
    together = derangements.uniform(6, 1, places)
    for place, drawn in zip(places, together, strict=True):
        np.testing.assert_array_equal(derangements.uniform(6, 1, [place])[0], drawn)


def test_draws_do_not_change_between_versions() -> None:
    """The draws are fixed numbers, on which ranks with different versions have to agree."""
    assert uniform(9, 5, 7, [0, 3]).tolist() == GOLDEN_UNIFORM
    assert roulette(uniform_table(7), 5, 7, [0, 3]).tolist() == GOLDEN_ROULETTE


def counts_of_four(drawn: np.ndarray) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, drawn.tolist()))


NINE = [p for p in permutations(range(4)) if all(i != j for i, j in enumerate(p))]


def test_all_nine_derangements_of_four_are_equally_likely() -> None:
    num = 90_000
    counts = counts_of_four(uniform(4, 2, 0, range(num)))
    assert set(counts) == set(NINE)
    chi_square = sum((counts[p] - num / 9) ** 2 / (num / 9) for p in NINE)
    assert chi_square < 31.8  # 8 degrees of freedom: exceeded once in 10 000


def test_the_sequential_roulette_is_what_the_paper_prints_with_redraws() -> None:
    """Exact chances of Alg. 2 with a uniform table, a dead end being drawn again: 0.0645 to 0.1935."""
    chances = {p: chance_of(p) for p in NINE}
    total = sum(chances.values())
    assert total == pytest.approx(1 - 0.139, abs=5e-4)
    assert min(chances.values()) / total == pytest.approx(0.0645, abs=5e-5)
    assert max(chances.values()) / total == pytest.approx(0.1935, abs=5e-5)
    num = 60_000
    counts = counts_of_four(roulette(uniform_table(4), 2, 0, range(num)))
    chi_square = sum((counts[p] - num * c / total) ** 2 / (num * c / total) for p, c in chances.items())
    assert chi_square < 31.8


def chance_of(sources: tuple[int, ...]) -> float:
    free, chance = set(range(len(sources))), 1.0
    for rank, source in enumerate(sources):
        chance /= len(free - {rank})
        free.remove(source)
    return chance


@pytest.mark.parametrize("size", [7, 32, 130])
def test_every_pair_is_equally_likely(size: int) -> None:
    """Each of n (n - 1) pairs has the chance 1 / (n - 1); these counts scatter less than independent ones."""
    num = 40_000 // size
    drawn = np.concatenate([uniform(size, 3, round, range(num)) for round in range(20)])
    counts = np.zeros((size, size))
    np.add.at(counts, (np.broadcast_to(np.arange(size), drawn.shape), drawn), 1)
    expected = len(drawn) / (size - 1)
    off_diagonal = counts[~np.eye(size, dtype=bool)]
    degrees = size * (size - 1) - 2 * size + 1
    chi_square = ((off_diagonal - expected) ** 2 / expected).sum()
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_weights_turn_the_roulette() -> None:
    """Rank 0 hears from rank 1 three times as often as from rank 2, and never from rank 3."""
    table = np.array([[0, 3, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]], dtype=float)
    drawn = roulette(table, 0, 0, range(20_000))
    assert_derangements(drawn)
    assert not (drawn[:, 0] == 3).any()
    # Exactly: chances of first draws times those that the rest does not end dead.
    possible = {p: table[0, p[0]] / 4 * chance_of_rest(table, p) for p in NINE if table[0, p[0]] > 0}
    total = sum(possible.values())
    expected = sum(chance for p, chance in possible.items() if p[0] == 1) / total
    assert (drawn[:, 0] == 1).mean() == pytest.approx(expected, abs=0.015)


def chance_of_rest(table: np.ndarray, sources: tuple[int, ...]) -> float:
    free, chance = set(range(4)) - {sources[0]}, 1.0
    for rank in range(1, 4):
        chance *= table[rank, sources[rank]] / sum(table[rank, source] for source in free)
        free.remove(sources[rank])
    return chance


def test_4096_ranks_and_50_segments_take_less_than_10_ms() -> None:
    """In processor time: others share the machine. On a slow one, hardly longer than drawing and sorting as much."""
    seconds, plain = [], []
    draws = np.random.default_rng(0)
    for round in range(15):
        begun = time.thread_time()
        uniform(4096, 0, round, range(50))
        drawn = time.thread_time()
        # Of e permutations one has no fixed point.
        draws.integers(2**63, size=(136, 4096)).sort(axis=1)
        seconds.append(drawn - begun)
        plain.append(time.thread_time() - drawn)
    assert np.median(seconds) < max(0.010, 2 * np.median(plain)), plain
