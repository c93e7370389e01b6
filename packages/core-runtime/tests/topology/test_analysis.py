"""The analysis of mixing against what is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.testing.topology import Irregular
from hocket.topology import Complete, Exponential, RandomMatching, Ring
from hocket.topology.analysis import analyse, deviation, imbalance, products, second_eigenvalue


@settings(max_examples=15)
@given(size=st.integers(3, 20))
def test_a_ring_loses_its_second_eigenvalue_each_round(size: int) -> None:
    """W is symmetric and the same in all rounds, so that eigenvalue and spectral norm are one."""
    found = analyse(Ring(), size, 4)
    expected = (1 / 3 + 2 / 3 * np.cos(2 * np.pi / size)) ** np.arange(1, 5)
    np.testing.assert_allclose(found.second_eigenvalue, expected, atol=1e-9)
    np.testing.assert_allclose(found.deviation, expected, atol=1e-9)


@settings(max_examples=15)
@given(size=st.integers(2, 20))
def test_a_complete_graph_averages_at_once(size: int) -> None:
    found = analyse(Complete(), size, 2)
    for values in (found.second_eigenvalue, found.deviation, found.imbalance):
        np.testing.assert_allclose(values, 0, atol=1e-12)


@pytest.mark.parametrize("hops", [2, 3, 5])
def test_an_exponential_graph_averages_exactly_after_its_hops(hops: int) -> None:
    found = analyse(Exponential(), 2**hops, hops)
    assert found.deviation[-2] > 0.5
    assert found.deviation[-1] < 1e-12


def test_products_are_taken_in_the_order_of_rounds() -> None:
    topology = Irregular()
    mixed = products(topology, 5, 3, 4)
    assert mixed.shape == (3, 4, 5, 5)
    for draw in range(4):
        first, second, third = (topology.mixing_matrix(5, round, draw) for round in range(3))
        np.testing.assert_allclose(mixed[2, draw], third @ second @ first)


def test_draws_that_are_all_the_same_are_looked_at_once() -> None:
    assert products(Ring(), 4, 2, 8).shape == (2, 1, 4, 4)
    assert products(RandomMatching(), 4, 2, 8).shape == (2, 8, 4, 4)


def test_measures_by_hand() -> None:
    swap_half = np.array([[0.75, 0.25], [0.25, 0.75]])
    assert second_eigenvalue(swap_half) == pytest.approx(0.5)
    assert deviation(swap_half) == pytest.approx(0.5)
    assert imbalance(swap_half) == pytest.approx(0.25**2)
    # Not normal: its eigenvalues are 1 and 0, and one round more would not change that all copy rank 0.
    copies = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert second_eigenvalue(copies) == pytest.approx(0)
    assert deviation(copies) == pytest.approx(1)
