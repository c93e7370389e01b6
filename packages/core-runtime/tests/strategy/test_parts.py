"""The plain parts of a strategy: world, complete, none, against what they are by definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.strategy import World
from hocket.strategy.segmentation import Bytes
from hocket.topology import Complete, Neighbours, Topology

SIZES = st.integers(1, 24)


@given(size=SIZES, round=st.integers(0, 10**9), segment=st.integers(0, 10**3))
def test_complete_averages_everything(size: int, round: int, segment: int) -> None:
    matrix = Complete().mixing_matrix(size, round, segment)
    np.testing.assert_allclose(matrix, np.full((size, size), 1 / size), rtol=1e-15)


@given(size=SIZES, rank=st.integers(0, 23))
def test_complete_receives_from_those_who_send(size: int, rank: int) -> None:
    rank %= size
    senders = {other for other in range(size) if rank in Complete().neighbours(other, size, 0, 0).send_to}
    received = Complete().neighbours(rank, size, 0, 0).receive_from
    assert set(received) == senders
    assert len(received) == len(senders) == size - 1


def test_a_mixing_matrix_has_the_senders_weight_in_the_receivers_row() -> None:
    matrix = _Chain().mixing_matrix(3, 0, 0)
    np.testing.assert_array_equal(matrix, [[0.25, 0, 0], [0.75, 0.25, 0], [0, 0.75, 1]])
    np.testing.assert_array_equal(matrix.sum(axis=0), 1)


class _Chain(Topology):
    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        before = (rank - 1,) if rank else ()
        if rank == size - 1:
            return Neighbours((), (), before, 1.0)
        return Neighbours((rank + 1,), (0.75,), before, 0.25)


def test_weights_must_be_given_to_each_and_sum_to_one() -> None:
    with pytest.raises(ValueError, match="send_weights has 1 weights for 2 ranks"):
        Neighbours((1, 2), (0.5,), (), 0.5)
    with pytest.raises(ValueError, match=r"sum to 0\.75, not to 1"):
        Neighbours((1,), (0.5,), (), 0.25)


def test_every_size_is_possible_unless_a_topology_says_otherwise() -> None:
    Complete().check_size(7)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_the_world_is_all_ranks(size: int, rank: int) -> None:
    assert World().ranks(rank % size, size) == range(size)


@pytest.mark.parametrize("size_mb", [0, -1, float("inf"), float("nan")])
def test_segments_have_a_finite_size(size_mb: float) -> None:
    with pytest.raises(ValueError, match="size_mb must be finite and more than 0"):
        Bytes(size_mb)
