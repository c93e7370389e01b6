"""The network model against its formulas, at numbers that can be checked by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.transport.reduction import tree_sum
from hocket.transport.virtual import NetworkModel

NETWORK = NetworkModel(latency_s=1.0, bandwidth_bits_per_s=80.0)


def test_messages() -> None:
    assert NETWORK.link_seconds(30) == 3.0
    assert NETWORK.message_seconds(30) == 4.0


@pytest.mark.parametrize(
    ("nbytes", "size", "seconds"),
    [
        (1000, 1, 0.0),
        (0, 8, 3.0),  # a barrier: three rounds of latency
        (10, 8, 6.0),  # recursive doubling: 3 (1 + 1)
        (8000, 8, 14 * 101.0),  # the ring: 14 (1 + 100)
        (0, 5, 3.0),
    ],
)
def test_allreduce(nbytes: int, size: int, seconds: float) -> None:
    assert NETWORK.allreduce_seconds(nbytes, size) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("nbytes", "size", "seconds"),
    [(1000, 1, 0.0), (10, 8, 6.0), (8000, 8, 10 + 14 / 8 * 800)],
)
def test_broadcast(nbytes: int, size: int, seconds: float) -> None:
    assert NETWORK.broadcast_seconds(nbytes, size) == pytest.approx(seconds)


def test_allgather() -> None:
    assert NETWORK.allgather_seconds(20, 5) == 3 + 4 * 2.0
    assert NETWORK.allgather_seconds(20, 1) == 0.0
    # Lengths of 8 bytes go first.
    assert NETWORK.allgatherv_seconds(20, 5) == pytest.approx(3 + 4 * 0.8 + 3 + 4 * 2.0)


@pytest.mark.parametrize(
    ("nbytes", "size", "seconds"),
    [(1000, 1, 0.0), (10, 8, 6.0), (8000, 8, 2 * 3 + 14 / 8 * 800)],
)
def test_reduce(nbytes: int, size: int, seconds: float) -> None:
    assert NETWORK.reduce_seconds(nbytes, size) == pytest.approx(seconds)


@settings(database=None)
@given(nbytes=st.integers(0, 10**12), size=st.integers(1, 4096))
def test_collectives_cost_at_least_a_latency_and_more_bytes_cost_more(nbytes: int, size: int) -> None:
    network = NETWORK
    gathers = (network.allgather_seconds, network.allgatherv_seconds)
    for cost in (network.allreduce_seconds, network.broadcast_seconds, network.reduce_seconds, *gathers):
        assert cost(nbytes, size) >= (NETWORK.latency_s if size > 1 else 0)
        assert cost(nbytes + 1, size) >= cost(nbytes, size)


@pytest.mark.parametrize(
    "numbers",
    [
        {"latency_s": -1.0},
        {"latency_s": math.nan},
        {"bandwidth_bits_per_s": 0.0},
        {"poll_s": 0.0},
        {"poll_s": math.inf},
    ],
)
def test_numbers_that_cannot_be(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(numbers))):
        NetworkModel(**numbers)


def test_a_model_is_a_value() -> None:
    assert dataclasses.replace(NETWORK, latency_s=2.0) == NetworkModel(2.0, 80.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_the_sum_s_order_is_the_tree_s(size: int) -> None:
    parts = [np.array([0.1 * rank, 1e8 if rank == 1 else rank], np.float32) for rank in range(size)]

    def reference(parts: list[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0]
        half = 2 ** math.ceil(math.log2(len(parts)) - 1)
        total: np.ndarray = reference(parts[:half]) + reference(parts[half:])
        return total

    kept = [part.copy() for part in parts]
    np.testing.assert_array_equal(tree_sum(parts), reference(kept))
    np.testing.assert_array_equal(parts, kept)  # and the ranks' buffers are left alone


def test_a_sum_may_overflow() -> None:
    assert tree_sum([np.full(1, 3e38, np.float32)] * 2) == np.inf
    assert tree_sum([np.array([value], np.int32) for value in (2**31 - 1, 1)]) == -(2**31)
