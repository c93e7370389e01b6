"""The compiled mixing has the bits of `weighted_sum`, in place and not, for any number of vectors and elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.arrays import MixingRows
from hocket.kernels import Mix
from hocket.topology import Exponential, RandomMatching
from hocket.transport.reduction import weighted_sum

Rows = list[list[tuple[int, float]]]


@st.composite
def rows_for(draw: st.DrawFn, num_ranks: int) -> Rows:
    weights = st.floats(-2, 2, allow_subnormal=False)
    term = st.tuples(st.integers(0, num_ranks - 1), weights)
    return [draw(st.lists(term, min_size=1, max_size=5)) for _ in range(num_ranks)]


def terms_of(rows: Rows) -> MixingRows:
    starts = np.cumsum([0, *map(len, rows)])
    sources, weights = zip(*(pair for row in rows for pair in row), strict=True)
    return MixingRows(starts, np.array(sources), np.array(weights))


def expected(values: list[np.ndarray], rows: Rows) -> list[np.ndarray]:
    outs = [np.empty_like(value) for value in values]
    for out, own in zip(outs, rows, strict=True):
        weighted_sum([values[source].copy() for source, _ in own], [weight for _, weight in own], out)
    return outs


def mix(places: list[tuple[list[np.ndarray], list[np.ndarray], Rows]]) -> set[int]:
    """What all ranks together do, one after the other."""
    values = [[array.ctypes.data for array in given] for given, _, _ in places]
    outs = [[array.ctypes.data for array in made] for _, made, _ in places]
    numels, terms = [place[0][0].size for place in places], [terms_of(place[2]) for place in places]
    found: set[int] = set()
    for rank in range(len(values[0])):
        mixing = Mix(rank, values, outs, numels, places[0][0][0].dtype)
        found.update(mixing(mixing.join(terms)))
    return found


@given(data=st.data(), num_ranks=st.integers(1, 6), numel=st.integers(0, 2100), double=st.booleans())
def test_the_bits_of_weighted_sum(data: st.DataObject, num_ranks: int, numel: int, double: bool) -> None:
    rows = data.draw(rows_for(num_ranks))
    draws = np.random.default_rng(numel)
    values = [draws.standard_normal(numel).astype("f8" if double else "f4") for _ in range(num_ranks)]
    given_values = [value.copy() for value in values]
    results = expected(values, rows)
    outs = [np.full_like(value, np.nan) for value in values]
    mix([(values, outs, rows)])
    for i in range(num_ranks):
        np.testing.assert_array_equal(outs[i], results[i])
        np.testing.assert_array_equal(values[i], given_values[i])
    mix([(values, values, rows)])
    for i in range(num_ranks):
        np.testing.assert_array_equal(values[i], results[i])


@pytest.mark.parametrize("shift", [0, 4], ids=["aligned", "unaligned"])
def test_nothing_is_written_beside_the_results(shift: int) -> None:
    memory = np.zeros(4096, dtype="f4")
    start = -memory.ctypes.data % 64 // 4 + 16 + shift
    out = memory[start : start + 1000]
    mix([([np.ones(1000, "f4")], [out], [[(0, 2.0)]])])
    assert (out == 2).all()
    assert memory.sum() == 2000


def test_nan_and_infinity_pass_through() -> None:
    values = [np.array([1, np.nan, np.inf, -np.inf], "f4"), np.array([1, 1, np.inf, np.inf], "f4")]
    mix([(values, values, [[(0, 0.5), (1, 0.5)], [(1, 1.0)]])])
    np.testing.assert_array_equal(values[0], np.array([1, np.nan, np.inf, np.nan], "f4"))
    assert mix([(values, values, [[(0, 1.0)], [(1, 1.0)]])]) == {0, 1}
    # Who reads them beside its own is not told.
    values[0][:] = 1
    assert mix([(values, values, [[(0, 1.0), (1, 1.0)], [(0, 1.0)]])]) == set()


@given(
    data=st.data(),
    num_ranks=st.integers(1, 4),
    numels=st.lists(st.integers(0, 1200), min_size=1, max_size=4),
    in_place=st.booleans(),
)
def test_places_of_several_lengths_and_graphs(
    data: st.DataObject, num_ranks: int, numels: list[int], in_place: bool
) -> None:
    places, results = [], []
    bad_place, bad_rank = (data.draw(st.integers(0, most - 1)) for most in (len(numels), num_ranks))
    for place, numel in enumerate(numels):
        rows = [[(rank, 0.5), *own] for rank, own in enumerate(data.draw(rows_for(num_ranks)))]
        values = [np.random.default_rng([numel, i]).standard_normal(numel) for i in range(num_ranks)]
        if place == bad_place and numel:
            values[bad_rank][-1] = np.inf
        with np.errstate(invalid="ignore"):
            results.append(expected(values, rows))
        places.append((values, values if in_place or place % 2 else list(map(np.empty_like, values)), rows))
    assert mix(places) == ({bad_rank} if numels[bad_place] else set())
    for (_, outs, _), expecteds in zip(places, results, strict=True):
        for out, result in zip(outs, expecteds, strict=True):
            np.testing.assert_array_equal(out, result)


def connected(rank: int, *graphs: MixingRows) -> list[int]:
    size = len(graphs[0].starts) - 1
    mixing = Mix(
        rank, [[0] * size] * len(graphs), [[0] * size] * len(graphs), [0] * len(graphs), np.dtype("f4")
    )
    return mixing.connected(mixing.join(graphs))


def test_no_more_ranks_are_connected_than_add_each_other_up() -> None:
    assert sorted(len(connected(rank, RandomMatching().mixing_rows(5, 0, 0))) for rank in range(5)) == [
        1,
        2,
        2,
        2,
        2,
    ]
    # One direction is enough.
    assert connected(0, Exponential().mixing_rows(6, 0, 0)) == [0, 1, 2, 3, 4, 5]
    assert connected(0, Exponential().mixing_rows(6, 1, 0)) == [0, 2, 4]
    # At any place; who is connected with one by another is not thereby.
    one_way, apart = (
        terms_of([[(0, 1.0)], [(1, 0.5), (0, 0.5)], [(2, 1.0)]]),
        terms_of([[(i, 1.0)] for i in range(3)]),
    )
    other_way = terms_of([[(0, 1.0)], [(1, 1.0)], [(2, 0.5), (1, 0.5)]])
    assert connected(0, one_way, other_way) == [0, 1]
    assert connected(1, one_way, other_way) == [0, 1, 2]
    assert connected(2, one_way, apart) == [2]
