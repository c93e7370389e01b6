"""The scaled copy has NumPy's bits, and finds a NaN or an Inf wherever it stands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.kernels import scaled_copy


@given(numel=st.integers(0, 3000), shift=st.integers(0, 20), factor=st.floats(-3, 3), double=st.booleans())
def test_the_bits_of_a_product(numel: int, shift: int, factor: float, double: bool) -> None:
    dtype = np.dtype("f8" if double else "f4")
    values = np.random.default_rng(numel).standard_normal(numel).astype(dtype)
    memory = np.zeros(numel + 64, dtype)
    start = -memory.ctypes.data % 64 // dtype.itemsize + shift
    out = memory[start : start + numel]
    assert scaled_copy(values, factor, out)
    np.testing.assert_array_equal(out, values * dtype.type(factor))
    assert not memory[:start].any()
    assert not memory[start + numel :].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1023, 1024, 2999])
def test_what_is_not_finite_is_found(bad: float, place: int) -> None:
    values = np.ones(3000, "f4")
    values[place] = bad
    out = np.empty_like(values)
    assert not scaled_copy(values, 0.5, out)
    assert not np.isfinite(out[place])


def test_a_product_that_overflows_is_found() -> None:
    assert not scaled_copy(np.full(10, 3e38, "f4"), 2.0, np.empty(10, "f4"))
    assert scaled_copy(np.full(10, 3e38, "f4"), 1.0, np.empty(10, "f4"))
