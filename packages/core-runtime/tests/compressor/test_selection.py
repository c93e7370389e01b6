"""Selections and their rounding, against plain NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from hocket.compressor import (
    BFloat16,
    Compressor,
    Float16,
    Identity,
    Message,
    SharedRandom,
    SparseValues,
    TopK,
    largest,
    sparse_bytes,
    unpack_sparse,
)
from hocket.errors import NonFiniteError
from hocket.segment.partition import ParameterSpan
from hocket.segment.segment import Segment
from hocket.segment.shape import SegmentShape
from hocket.testing.compressor import dense, fill, make_segment, run_round

# Few different values, so that there are ties, and all kinds of them.
_KINDS = (0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, -1e-38, 3e38, math.inf, -math.inf, math.nan)
_VALUES = st.sampled_from([float(np.float32(each)) for each in _KINDS])
_ARRAYS = arrays.arrays(np.float32, st.integers(0, 40), elements=_VALUES | st.floats(width=32))


def largest_by_sorting(values: np.ndarray, count: int) -> list[int]:
    """Sort by magnitude, the largest first, NaN before all, and by index where they are equal."""
    keys = [(-math.inf, i) if math.isnan(v) else (-abs(float(v)), i) for i, v in enumerate(values)]
    # NaN and Inf would be equal in this order: NaN first.
    order = sorted(range(len(values)), key=lambda i: (not math.isnan(values[i]), *keys[i]))
    return sorted(order[:count])


@given(_ARRAYS, st.integers(0, 40))
def test_largest_against_a_sort(values: np.ndarray, count: int) -> None:
    count = min(count, len(values))
    num_nan = int(np.isnan(values).sum())
    indices, chosen = largest(torch.from_numpy(values), count)
    np.testing.assert_array_equal(chosen, values[indices])
    if num_nan >= count:
        # More NaN than places: any of them will do, the step is lost in any case.
        assert len(set(indices.tolist())) == count
    else:
        assert indices.tolist() == largest_by_sorting(values, count)


@pytest.mark.gpu
@given(_ARRAYS, st.integers(0, 40))
def test_largest_on_a_gpu_is_largest_on_a_cpu(values: np.ndarray, count: int) -> None:
    data = torch.from_numpy(values[~np.isnan(values)])
    count = min(count, len(data))
    for on_gpu, on_cpu in zip(largest(data.cuda(), count), largest(data, count), strict=True):
        np.testing.assert_array_equal(on_gpu, on_cpu)


@pytest.mark.parametrize(
    ("shapes", "density", "count"),
    [((3, 1, 2), 1.0, 6), ((3, 1, 2), 0.5, 3), ((3, 1, 2), 0.01, 1), ((20, 5), 0.2, 5)],
)
def test_padding_is_neither_counted_nor_chosen(shapes: tuple[int, ...], density: float, count: int) -> None:
    """Three tiny tensors take 48 places; all zeros, every place is as large as any other."""
    segment, compressor = make_segment(shapes), TopK(density)
    own = {place for span in segment.spans for place in range(span.start, span.stop)}
    for values in (torch.zeros_like(segment.outgoing), torch.randn(segment.outgoing.numel())):
        for span in segment.spans:
            segment.outgoing[span.start : span.stop] = values[span.start : span.stop]
        message = run_round(compressor, segment, compressor.init(segment), 0)
        chosen = unpack_sparse(message).indices.tolist()
        assert len(chosen) == count
        assert own.issuperset(chosen)
        assert len(message.payload) == compressor.footprint(segment).message_bytes


@pytest.mark.parametrize(
    ("density", "numel", "count"), [(0.001, 1008, 1), (0.1, 1008, 101), (1e-9, 1008, 1), (1.0, 1008, 1008)]
)
def test_density_says_how_many(density: float, numel: int, count: int) -> None:
    segment = make_segment([numel])
    fill(segment, 0)
    for compressor in (TopK(density), SharedRandom(density)):
        message = run_round(compressor, segment, compressor.init(segment), 0)
        assert dense(compressor, message).count_nonzero() == count


def sparse(segment: Segment, compressor: TopK) -> SparseValues:
    return unpack_sparse(run_round(compressor, segment, compressor.init(segment), 0))


def test_sparse_message_by_hand() -> None:
    segment = make_segment([16], trailer_numel=2)
    segment.outgoing.copy_(torch.tensor([0.0, 3, 0, -5, 0, 1, *[0] * 10, 0.5, 7]))
    message = run_round(TopK(2 / 16), segment, TopK(2 / 16).init(segment), 0)
    values, indices = np.array([0.5, 7, 3, -5], np.float32), np.array([1, 3], np.int32)
    expected = np.int64(2).tobytes() + values.tobytes() + indices.tobytes()
    assert message.payload.tobytes() == expected
    assert sparse_bytes(segment, 2) == len(expected) == 32
    assert sparse_bytes(segment, 1) == 24


def test_sparse_message_may_be_received_into_a_longer_buffer() -> None:
    segment = make_segment([100], trailer_numel=1)
    fill(segment, 0)
    message = run_round(TopK(0.1), segment, TopK(0.1).init(segment), 0)
    longer = np.concatenate([message.payload, np.full(100, 255, dtype=np.uint8)])
    assert torch.equal(dense(TopK(0.1), Message(longer, segment, 0)), dense(TopK(0.1), message))


@pytest.mark.parametrize("payload", [[], [1, 0, 0], [9, *[0] * 7, 1, 2, 3], [255] * 64])
def test_sparse_messages_that_were_cut_are_noticed(payload: list[int]) -> None:
    segment = make_segment([100])
    message = Message(np.array(payload, dtype=np.uint8), segment, 0)
    with pytest.raises(ValueError, match=r"a message of \d+ bytes for gradients.0\[0\] claims"):
        TopK(0.1).accumulate(message, 1.0, segment.incoming)


def test_segments_too_long_for_their_indices_are_refused() -> None:
    class Long(SegmentShape):
        trailer_numel = 0
        spans = (ParameterSpan("p", 0, 2**31, (2**31,), (1,), torch.float32, torch.device("cpu")),)

    with pytest.raises(ValueError, match=r"2147483648 elements .*segments: layers or bytes"):
        Long().check_indexable()


@pytest.mark.parametrize("density", [0, -0.1, 1.5, math.nan])
@pytest.mark.parametrize("compressor", [TopK, SharedRandom])
def test_density_out_of_range(compressor: type[TopK] | type[SharedRandom], density: float) -> None:
    with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
        compressor(density)


def coordinates(density: float, numel: int, round: int, index: int, seed: int = 0) -> list[int]:
    """Return where a message of ones arrives, padding included."""
    segment = make_segment([numel], index=index)
    segment.outgoing.fill_(1.0)
    compressor = SharedRandom(density, seed)
    message = run_round(compressor, segment, compressor.init(segment), round)
    return torch.nonzero(dense(compressor, message))[:, 0].tolist()


@given(st.floats(1e-6, 1), st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 9))
def test_one_coordinate_is_drawn_from_each_run(
    density: float, numel: int, round: int, index: int, seed: int
) -> None:
    drawn = coordinates(density, numel, round, index, seed)
    padded = -(-numel // 16) * 16
    count = min(padded, max(1, round_half_even(density * padded)))
    assert len(drawn) == count
    for run, coordinate in enumerate(drawn):
        assert run * padded // count <= coordinate < (run + 1) * padded // count


def round_half_even(value: float) -> int:
    return int(np.rint(value))


def test_drawn_coordinates_depend_on_the_whole_address() -> None:
    first = coordinates(0.1, 1000, 3, 2, seed=1)
    assert first == coordinates(0.1, 1000, 3, 2, seed=1)
    for other in (
        coordinates(0.1, 1000, 4, 2, seed=1),
        coordinates(0.1, 1000, 3, 3, seed=1),
        coordinates(0.1, 1000, 3, 2, seed=2),
    ):
        assert other != first


def test_every_coordinate_is_drawn_as_often() -> None:
    """48 coordinates in runs of 8: each in an eighth of 4,000 rounds, within 5 standard deviations."""
    counts = np.zeros(48)
    for round in range(4000):
        counts[coordinates(6 / 48, 48, round, 0)] += 1
    assert np.all(np.abs(counts - 500) < 5 * np.sqrt(4000 * 1 / 8 * 7 / 8))


@given(arrays.arrays(np.float32, 32, elements=st.floats(-65504, 65504, width=32)), st.floats(-4, 4, width=16))
def test_float16_against_numpy(values: np.ndarray, weight: float) -> None:
    out = cast_and_add(Float16(), values, weight)
    expected = np.float64(1) + weight * values.astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=2e-7, atol=1e-7 * np.abs(weight * values).max())


@given(
    arrays.arrays(np.float32, 32, elements=st.floats(-(2.0**99), 2.0**99, width=32)),
    st.floats(-4, 4, width=16),
)
def test_bfloat16_against_bits(values: np.ndarray, weight: float) -> None:
    out = cast_and_add(BFloat16(), values, weight)
    # Round to nearest even on the upper 16 of 32 bits.
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    expected = 1 + weight * rounded.astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=2e-7, atol=1e-7 * np.abs(weight * rounded).max())


def cast_and_add(compressor: Compressor, values: np.ndarray, weight: float) -> np.ndarray:
    segment = make_segment([len(values)])
    segment.outgoing.copy_(torch.from_numpy(values))
    message = run_round(compressor, segment, compressor.init(segment), 0)
    assert message.payload.nbytes == 2 * len(values)
    out = torch.ones_like(segment.outgoing)
    compressor.accumulate(message, weight, out)
    return out.numpy()


def test_casts_of_long_segments() -> None:
    values = np.linspace(-1, 1, 16 * 40_000, dtype=np.float32)
    expected = 1 + 0.5 * values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(cast_and_add(Float16(), values, 0.5), expected)


def test_casts_are_summed_in_float32() -> None:
    """2048 + 1 is 2048 in float16: a sum of 100 ones on top of it would be lost."""
    segment = make_segment([16])
    out = torch.full_like(segment.outgoing, 2048)
    segment.outgoing.fill_(1)
    state = Float16().init(segment)
    for _ in range(100):
        Float16().accumulate(run_round(Float16(), segment, state, 0), 1.0, out)
    assert out.tolist() == [2148] * 16


@pytest.mark.parametrize(
    ("compressor", "dtype", "largest_kept", "too_large"),
    [
        (Float16(), torch.float32, 65519.0, 65520.0),
        (Float16(), torch.float64, -65519.0, -1e300),
        (BFloat16(), torch.float32, 3.39e38, 3.4e38),
        (BFloat16(), torch.float64, 3.39e38, -1e39),
    ],
)
def test_values_that_would_become_inf_are_named(
    compressor: Compressor, dtype: torch.dtype, largest_kept: float, too_large: float
) -> None:
    segment = make_segment([20, 20], dtype)
    state = compressor.init(segment)
    segment.outgoing[35] = largest_kept
    assert dense(compressor, run_round(compressor, segment, state, 0)).isfinite().all()
    segment.outgoing[35] = too_large
    with pytest.raises(NonFiniteError, match=r"p1: .* does not fit b?float16.* use compressor bf16, or none"):
        run_round(compressor, segment, state, 1)


@pytest.mark.parametrize("compressor", [Identity(), Float16(), BFloat16(), TopK(0.1), SharedRandom(1.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_arrive(compressor: Compressor, bad: float) -> None:
    segment = make_segment([100])
    fill(segment, 0)
    segment.outgoing[37] = bad
    arrived = dense(compressor, run_round(compressor, segment, compressor.init(segment), 0))
    assert_same(arrived[37], torch.tensor(bad))


def assert_same(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, equal_nan=True)
