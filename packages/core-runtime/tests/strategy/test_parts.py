"""The plain parts of a strategy: world, complete, none, against what they are by definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.segment.partition import Bytes
from hocket.strategy import Group, Leaders, Placement, World
from hocket.strategy.scope import GroupBy
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


def test_weights_must_be_given_to_each() -> None:
    with pytest.raises(ValueError, match="send_weights has 1 weights for 2 ranks"):
        Neighbours((1, 2), (0.5,), (), 0.5)


def test_every_size_is_possible_unless_a_topology_says_otherwise() -> None:
    Complete().check_size(7)


@given(st.integers(1, 100))
def test_the_world_is_all_ranks(size: int) -> None:
    assert World().parts(Placement.on_one_host(size)) == (tuple(range(size)),)


@given(st.integers(1, 40), st.integers(1, 40))
def test_groups_hold_every_rank_once_and_their_leaders_are_their_first(size: int, group_size: int) -> None:
    placement = Placement.on_one_host(size)
    groups = Group(size=group_size).parts(placement)
    assert [rank for group in groups for rank in group] == list(range(size))
    assert all(len(group) == group_size for group in groups[:-1])
    assert Leaders(size=group_size).parts(placement) == (tuple(group[0] for group in groups),)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_count_of_groups_makes_them_as_even_as_can_be(size: int, count: int) -> None:
    placement = Placement.on_one_host(size)
    if count > size:
        with pytest.raises(
            ValueError, match=f"count: {count} groups need {count} ranks or more, but there are {size}"
        ):
            Group(count=count).parts(placement)
        return
    groups = Group(count=count).parts(placement)
    assert [rank for group in groups for rank in group] == list(range(size))
    assert len(groups) == count
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_the_ranks_of_a_host_are_a_group() -> None:
    placement = Placement.of(["a", "b", "a", "c", "b"])
    assert Group(by=GroupBy.HOST).parts(placement) == ((0, 2), (1, 4), (3,))
    assert Leaders(by=GroupBy.HOST).parts(placement) == ((0, 1, 3),)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 50))
def test_with_sharded_leaders_one_rank_of_each_group_carries_a_segment(
    num_groups: int, group_size: int, segment: int
) -> None:
    placement = Placement.on_one_host(num_groups * group_size)
    leaders = Leaders(size=group_size, sharded=True)
    [carrying] = leaders.carriers(segment, placement)
    groups = Group(size=group_size, sharded=True)
    assert list(carrying) == [group[groups.leader(group_size, segment)] for group in groups.parts(placement)]
    assert carrying in leaders.parts(placement)


def test_sharded_leaders_need_groups_of_one_size() -> None:
    with pytest.raises(
        ValueError, match="sharded leaders need groups of equal size, but these have 1 and 4 ranks"
    ):
        Leaders(size=4, sharded=True).parts(Placement.on_one_host(5))


@pytest.mark.parametrize("fields", [{}, {"size": 2, "count": 2}, {"size": 0}, {"count": -1}])
def test_groups_are_given_by_one_thing(fields: Any) -> None:
    with pytest.raises(ValueError, match=r"give exactly one of size, count and by|must be 1 or more"):
        Group(**fields)


@pytest.mark.parametrize("size_mb", [0, -1, float("inf"), float("nan")])
def test_segments_have_a_finite_size(size_mb: float) -> None:
    with pytest.raises(ValueError, match="size_mb must be finite and more than 0"):
        Bytes(size_mb)


@pytest.mark.parametrize("first_mb", [0, -1, float("nan")])
def test_a_first_segment_has_a_size(first_mb: float) -> None:
    with pytest.raises(ValueError, match="first_mb must be more than 0, or null"):
        Bytes(25.0, first_mb)
