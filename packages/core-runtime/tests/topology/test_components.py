"""No more ranks wait for each other than are connected."""

from __future__ import annotations

from hocket.topology import Exponential, RandomMatching


def test_a_matching_has_components_of_two() -> None:
    sizes = sorted(len(RandomMatching().component_terms(rank, 5, 0, 0)) for rank in range(5))
    assert sizes == [1, 2, 2, 2, 2]


def test_one_direction_is_enough_to_be_connected() -> None:
    assert list(Exponential().component_terms(0, 6, 0, 0)) == [0, 1, 2, 3, 4, 5]
    assert list(Exponential().component_terms(0, 6, 1, 0)) == [0, 2, 4]
