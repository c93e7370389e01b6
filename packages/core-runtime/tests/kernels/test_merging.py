"""The merge of a delayed exchange has torch's bits, and finds a NaN or an Inf wherever it stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.kernels import merge_delayed


@given(
    numel=st.integers(0, 3000),
    factor=st.floats(-3, 3),
    double=st.booleans(),
    sends=st.booleans(),
    spread=st.integers(0, 30),
)
def test_the_bits_of_five_passes(numel: int, factor: float, double: bool, sends: bool, spread: int) -> None:
    rng = np.random.default_rng(numel)
    values, combined, sent = (
        (rng.standard_normal(numel) * 2.0 ** rng.integers(-spread, spread + 1, numel)).astype(
            "f8" if double else "f4"
        )
        for _ in range(3)
    )
    expected = torch.from_numpy(values.copy())
    expected.add_(torch.from_numpy(combined.copy()).mul_(factor).sub_(torch.from_numpy(sent)))
    before = sent.copy()
    assert merge_delayed(values, combined, factor, sent, sends=sends)
    np.testing.assert_array_equal(values.view("u1"), expected.numpy().view("u1"))
    np.testing.assert_array_equal(sent.view("u1"), (values if sends else before).view("u1"))


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1023, 1024, 2999])
def test_what_is_not_finite_is_found(bad: float, place: int, sends: bool) -> None:
    values, combined, sent = (np.ones(3000, "f4") for _ in range(3))
    combined[place] = bad
    assert not merge_delayed(values, combined, 1.0, sent, sends=sends)
    assert not np.isfinite(values[place])
