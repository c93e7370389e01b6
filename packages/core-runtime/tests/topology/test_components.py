"""The terms of a round's components are the mixing matrix's rows, and no more ranks wait than are connected."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.topology import (
    Complete,
    Exponential,
    Peers,
    RandomMatching,
    Ring,
    Topology,
    component_terms,
)

TOPOLOGIES = [Complete(), Exponential(), Exponential(Peers.ALL), RandomMatching(), Ring()]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_terms_are_the_rows_of_the_mixing_matrix(topology: Topology, size: int) -> None:
    for round in range(4):
        matrix = np.zeros((size, size))
        for rank in range(size):
            terms = component_terms(topology, rank, size, round, segment=2)
            assert list(terms) == sorted(terms)
            assert terms[rank][0][0] == rank  # its own comes first
            received = topology.neighbours(rank, size, round, 2).receive_from
            assert [source for source, _ in terms[rank][1:]] == list(received)
            for source, weight in terms[rank]:
                matrix[rank, source] = weight
            # All members of a component know the same one.
            assert all(component_terms(topology, member, size, round, 2) == terms for member in terms)
        np.testing.assert_array_equal(matrix, topology.mixing_matrix(size, round, 2))


def test_a_matching_has_components_of_two() -> None:
    sizes = sorted(len(component_terms(RandomMatching(), rank, 5, 0, 0)) for rank in range(5))
    assert sizes == [1, 2, 2, 2, 2]


def test_one_direction_is_enough_to_be_connected() -> None:
    assert list(component_terms(Exponential(), 0, 6, 0, 0)) == [0, 1, 2, 3, 4, 5]
    assert list(component_terms(Exponential(), 0, 6, 1, 0)) == [0, 2, 4]
