"""Draws are functions of their address, and fair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket import draws

ADDRESS = ("test", 7, 3, 2)


def test_words_never_change() -> None:
    """NumPy promises Philox's raw words to be the same in all versions; so must be how they are addressed."""
    assert draws.words(3, *ADDRESS).tolist() == [
        16346799670406887815,
        15479066028032905559,
        6766393769361991512,
    ]


@pytest.mark.parametrize(
    "other", [("tset", 7, 3, 2), ("test", 8, 3, 2), ("test", 7, 4, 2), ("test", 7, 3, 3)]
)
def test_every_part_of_the_address_matters(other: tuple[str, int, int, int]) -> None:
    words = np.concatenate([draws.words(1000, *ADDRESS), draws.words(1000, *other)])
    assert len(np.unique(words)) == 2000


@pytest.mark.parametrize("domain", ["", "ninechars", "grüße"])
def test_a_domain_that_is_no_address_is_refused(domain: str) -> None:
    with pytest.raises(ValueError, match=f"^domain is '{domain}'; allowed: 1 to 8 ASCII characters$"):
        draws.permutation(4, domain, 0, 0)


@given(st.integers(0, 50), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_shorter_draws_are_the_beginning_of_longer_ones(
    num: int, seed: int, round: int, segment: int
) -> None:
    address = ("test", seed, round, segment)
    np.testing.assert_array_equal(draws.words(num, *address), draws.words(50, *address)[:num])
    assert sorted(draws.permutation(num, *address).tolist()) == list(range(num))


@given(st.integers(0, 9), st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_rows_are_the_words_of_their_segments(num: int, round: int, segments: list[int]) -> None:
    drawn = draws.rows(num, "test", 7, round, segments)
    assert drawn.shape == (len(segments), num)
    for row, segment in zip(drawn, segments, strict=True):
        np.testing.assert_array_equal(row, draws.words(num, "test", 7, round, segment))


@given(st.lists(st.integers(1, 2**31), max_size=20), st.integers(0, 2**64 - 1))
def test_integers_stay_below_their_bounds(bounds: list[int], seed: int) -> None:
    drawn = draws.below(np.array(bounds, dtype=np.int64), "test", seed, 0)
    assert drawn.dtype == np.int64
    # Exact integers of Python are the oracle of the 64-bit arithmetic.
    words = draws.words(len(bounds), "test", seed, 0).tolist()
    assert drawn.tolist() == [((word >> 32) * bound) >> 32 for word, bound in zip(words, bounds, strict=True)]
    assert all(0 <= value < bound for value, bound in zip(drawn.tolist(), bounds, strict=True))


def test_integers_are_uniform() -> None:
    """Each of 5 integers in a fifth of 10,000 draws, within 5 standard deviations."""
    counts = np.bincount(draws.below(np.full(10_000, 5), *ADDRESS), minlength=5)
    assert np.all(np.abs(counts - 2000) < 5 * np.sqrt(10_000 * 0.2 * 0.8))
