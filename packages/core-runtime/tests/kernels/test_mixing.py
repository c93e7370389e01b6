"""The compiled mixing has the bits of `weighted_sum`, in place and not, for any number of vectors and elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.kernels import Mix, Sums
from hocket.transport.reduction import weighted_sum

Terms = list[list[tuple[int, float]]]


@st.composite
def terms_for(draw: st.DrawFn, num_vectors: int) -> Terms:
    weights = st.floats(-2, 2, allow_subnormal=False)
    term = st.tuples(st.integers(0, num_vectors - 1), weights)
    return [draw(st.lists(term, min_size=1, max_size=5)) for _ in range(num_vectors)]


def expected(values: list[np.ndarray], terms: Terms) -> list[np.ndarray]:
    outs = [np.empty_like(value) for value in values]
    for out, own in zip(outs, terms, strict=True):
        weighted_sum([values[source].copy() for source, _ in own], [weight for _, weight in own], out)
    return outs


def mix(values: list[np.ndarray], outs: list[np.ndarray], terms: Terms) -> list[int]:
    values_at, outs_at = ([array.ctypes.data for array in arrays] for arrays in (values, outs))
    return Mix([Sums(values_at, outs_at, terms, values[0].size)], values[0].dtype)()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_vectors=st.integers(1, 6), numel=st.integers(0, 1100), double=st.booleans())
def test_the_bits_of_weighted_sum(data: st.DataObject, num_vectors: int, numel: int, double: bool) -> None:
    terms = data.draw(terms_for(num_vectors))
    draws = np.random.default_rng(numel)
    values = [draws.standard_normal(numel).astype("f8" if double else "f4") for _ in range(num_vectors)]
    given_values = [value.copy() for value in values]
    results = expected(values, terms)
    outs = [np.full_like(value, np.nan) for value in values]
    mix(values, outs, terms)
    for i in range(num_vectors):
        np.testing.assert_array_equal(outs[i], results[i])
        np.testing.assert_array_equal(values[i], given_values[i])
    mix(values, values, terms)
    for i in range(num_vectors):
        np.testing.assert_array_equal(values[i], results[i])


@pytest.mark.parametrize("shift", [0, 4], ids=["aligned", "unaligned"])
def test_nothing_is_written_beside_the_results(shift: int) -> None:
    memory = np.zeros(4096, dtype="f4")
    start = -memory.ctypes.data % 64 // 4 + 16 + shift
    out = memory[start : start + 1000]
    mix([np.ones(1000, "f4")], [out], [[(0, 2.0)]])
    assert (out == 2).all()
    assert memory.sum() == 2000


def test_nan_and_infinity_pass_through() -> None:
    values = [np.array([1, np.nan, np.inf, -np.inf], "f4"), np.array([1, 1, np.inf, np.inf], "f4")]
    mix(values, values, [[(0, 0.5), (1, 0.5)], [(1, 1.0)]])
    np.testing.assert_array_equal(values[0], np.array([1, np.nan, np.inf, np.nan], "f4"))
    assert mix(values, values, [[(0, 1.0)], [(1, 1.0)]]) == [0, 1]
    assert mix([values[0][:1], values[1]], values[:1], [[(0, 1.0)]]) == []


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(), sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 600)), min_size=1, max_size=4)
)
def test_sums_of_several_lengths_and_numbers(data: st.DataObject, sizes: list[tuple[int, int]]) -> None:
    sums, all_values, all_expected = [], [], []
    poisoned = data.draw(st.integers(0, sum(num for num, _ in sizes) - 1))
    for num_vectors, numel in sizes:
        terms = [*data.draw(terms_for(num_vectors))[:-1], [(i, 1.0) for i in range(num_vectors)]]
        terms = [[(i, 0.5), *own] for i, own in enumerate(terms)]
        values = [np.random.default_rng(numel + i).standard_normal(numel) for i in range(num_vectors)]
        if len(all_values) <= poisoned < len(all_values) + num_vectors and numel:
            values[poisoned - len(all_values)][-1] = np.inf
        with np.errstate(invalid="ignore"):
            all_expected += expected(values, terms)
        addresses = [value.ctypes.data for value in values]
        sums.append(Sums(addresses, addresses, terms, numel))
        all_values += values
    nonfinite = [i for i, value in enumerate(all_values) if not np.isfinite(value).all()]
    assert Mix(sums, np.dtype(np.float64))() == nonfinite
    for value, result in zip(all_values, all_expected, strict=True):
        np.testing.assert_array_equal(value, result)
