"""The compressors against the contract, and against what their sources say, in NumPy, value by value."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from codes import largest_of_chunks, levels_of

from hocket.compressor import BFloat16, Compressor, ErrorFeedback, TopK
from hocket.testing.compressor import CompressorConformance, dense, fill, make_segment, run_round
from hocket_diloco.chunk_topk import ChunkTopK
from hocket_diloco.quantise import Format, Per, Quantise

TWO_BITS = Quantise(ChunkTopK(128, 8), format=Format.INT2, statistical=True)


class Conformance(CompressorConformance):
    sizes = (0, 7, 1000)


class TestQuantise(Conformance):
    compressors = (
        Quantise(),
        Quantise(format=Format.INT4, per=Per.CHUNK, chunk=40),
        Quantise(format=Format.INT2, per=Per.ROW, statistical=True),
        Quantise(format=Format.E3M0),
        Quantise(format=Format.SIGN),
    )


class TestChunkTopK(Conformance):
    compressors = (
        ChunkTopK(),
        ChunkTopK(64, 3),
        TWO_BITS,
        Quantise(ChunkTopK(100, 7), Format.E3M0, Per.CHUNK),
    )


class TestAllOfAChunk(Conformance):
    compressors = (ChunkTopK(16, 16),)
    relative_error = 0.0


class TestWithFeedback(Conformance):
    compressors = (ErrorFeedback(TWO_BITS), ErrorFeedback(Quantise(format=Format.E3M0)))
    rounding = 1e-6


def runs(shapes: list[tuple[int, ...]], compressor: Quantise) -> list[slice]:
    """Return the groups of parameters that lie one after the other."""
    found, start = [], 0
    for shape in shapes:
        numel = int(np.prod(shape))
        length = {Per.TENSOR: numel, Per.ROW: shape[-1], Per.CHUNK: compressor.chunk}[compressor.per]
        found += [
            slice(first, min(first + length, start + numel)) for first in range(start, start + numel, length)
        ]
        start += numel
    return found


FORMATS: list[dict[str, Any]] = [
    {"format": form, "statistical": statistical}
    for form, statistical in itertools.product(Format, (False, True))
    if not (statistical and form in (Format.SIGN, Format.E3M0))
]


@pytest.mark.parametrize("per", Per)
@pytest.mark.parametrize("fields", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_are_those_of_the_definition(dtype: torch.dtype, fields: dict[str, Any], per: Per) -> None:
    compressor = Quantise(**fields, per=per, chunk=1500)
    shapes = [(40, 80), (2000,)]
    segment = segment_of(shapes, dtype)
    fill(segment, 3)
    given = segment.outgoing[: segment.numel].double().numpy().copy()
    message = run_round(compressor, segment, compressor.init(segment), 0)
    arrived = dense(compressor, message)[: segment.numel].double().numpy()
    groups = runs(shapes, compressor)
    expected = np.concatenate([levels_of(given[group], compressor) for group in groups])
    np.testing.assert_allclose(arrived, expected, rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(given - arrived) <= np.linalg.norm(given)
    bits = {Format.INT8: 8, Format.INT4: 4, Format.INT2: 2, Format.E3M0: 4, Format.SIGN: 1}[compressor.format]
    table = 2**bits if compressor.statistical else 1
    assert message.payload.nbytes == len(groups) * table * dtype.itemsize + sum(
        -(-(group.stop - group.start) * bits // 8) for group in groups
    )


def segment_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Any:
    """Return a segment of parameters without padding between them."""
    from hocket.segment.partition import Model, named_spans, partition
    from hocket.segment.segment import Segment

    [spans] = partition(
        named_spans((f"p{i}", torch.zeros(shape, dtype=dtype)) for i, shape in enumerate(shapes)), Model()
    )
    numel = spans[-1].start + spans[-1].padded_numel
    assert numel == sum(span.numel for span in spans)
    return Segment("parameters.0[0]", 0, spans, *(torch.zeros(numel, dtype=dtype) for _ in range(2)))


def test_zeros_stay_zeros_and_nan_is_seen() -> None:
    for fields in FORMATS:
        compressor, segment = Quantise(**fields), make_segment([500])
        assert not dense(compressor, run_round(compressor, segment, compressor.init(segment), 0)).any()
        fill(segment, 1)
        segment.outgoing[17] = torch.nan
        arrived = dense(compressor, run_round(compressor, segment, compressor.init(segment), 0))
        assert arrived[:500].isnan().all()


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "falling", "heavy"])
def test_the_largest_of_each_chunk_travel(kind: str) -> None:
    """The values are those of 3 chunks and a shorter one, in the order of their places; of equal ones the first."""
    numel, chunk, k = 3 * 4096 + 1000, 4096, 64
    rng = np.random.default_rng(0)
    values = {
        "normal": rng.standard_normal(numel),
        "ties": rng.integers(-2, 3, numel),
        "zeros": np.where(np.arange(numel) % 500 == 0, 1.0, 0.0),
        "falling": np.exp(-np.arange(numel) / 100),
        "heavy": rng.standard_cauchy(numel) * np.repeat([1, 1e-9, 1e9, 1], 4096)[:numel],
    }[kind].astype(np.float32)
    compressor, segment = ChunkTopK(chunk, k), make_segment([numel])
    segment.outgoing[:numel] = torch.from_numpy(values)
    message = run_round(compressor, segment, compressor.init(segment), 0)
    chosen, expected = largest_of_chunks(values, chunk, k), np.zeros(numel, np.float32)
    expected[chosen] = values[chosen]
    np.testing.assert_array_equal(dense(compressor, message)[:numel], expected)
    assert message.payload.nbytes == 4 * len(chosen) + -(-12 * len(chosen) // 8)


def test_a_value_of_sparseloco_takes_14_bits() -> None:
    """And 4 numbers for each parameter: 2 bits and 12 for its place, 64 of 4096."""
    compressor = Quantise(ChunkTopK(), format=Format.INT2, statistical=True)
    segment = segment_of([(256, 512), (4096,)])
    fill(segment, 0)
    payload = run_round(compressor, segment, compressor.init(segment), 0).payload
    assert payload.nbytes == segment.numel // 64 * 14 // 8 + 2 * 4 * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantise(TopK()), "works only around compressor none or diloco.chunk_topk"),
        (lambda: Quantise(BFloat16()), "works only around"),
        (lambda: Quantise(chunk=4), "chunk must be 8 or more, not 4"),
        (
            lambda: Quantise(format=Format.E3M0, statistical=True),
            "statistical does not work with e3m0, whose levels are fixed",
        ),
        (lambda: ChunkTopK(5000), "chunk must be 1 to 4096, not 5000, as indices have 12 bits"),
        (lambda: ChunkTopK(64, 65), r"k must be 1 to 64 \(the elements of a chunk\), not 65"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_place_beyond_its_chunk_is_refused() -> None:
    compressor: Compressor = ChunkTopK()
    segment = make_segment([1000])
    fill(segment, 0)
    message = run_round(compressor, segment, compressor.init(segment), 0)
    message.payload[-3:] = 255
    with pytest.raises(IndexError, match="an index beyond its chunk of 4096"):
        dense(compressor, message)
