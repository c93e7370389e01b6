"""Cutting models: properties that hold for all names, shapes, dtypes and sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hocket.segment.partition import (
    ALIGNMENT_BYTES,
    Bytes,
    Layers,
    Model,
    ParameterSpan,
    Segmentation,
    named_spans,
    partition,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
MIB = 1 << 20


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpan]:
    """Draw a model's parameters: up to five layers of up to three, of mixed dtypes, some empty."""
    parameters = []
    for layer in range(draw(st.integers(1, 5))):
        prefix = draw(st.sampled_from(["", f"block{layer % 2}."])) + f"layer{layer}."
        for number in range(draw(st.integers(1, 3))):
            shape = draw(st.lists(st.integers(0, 9), max_size=3))
            dtype = draw(st.sampled_from(DTYPES))
            parameters.append((f"{prefix}p{number}", torch.empty(shape, dtype=dtype)))
    return named_spans(parameters)


sizes_mb = st.floats(1e-5, 1e-2)
growing = st.builds(Bytes, sizes_mb, first_mb=sizes_mb)
segmentations = st.one_of(st.just(Model()), st.just(Layers()), sizes_mb.map(Bytes), growing)


@given(models(), segmentations, st.booleans())
def test_every_parameter_once_in_order_without_overlap(
    spans: list[ParameterSpan], segmentation: Segmentation, backward: bool
) -> None:
    cut = partition(spans, segmentation, backward=backward)
    names = [span.name for span in spans]
    assert sorted(span.name for run in cut for span in run) == sorted(names)
    for run in cut:
        assert run
        assert len({(span.dtype, span.device) for span in run}) == 1
        order = [names.index(span.name) for span in run]
        assert order == sorted(order, reverse=backward)
        for span, following in itertools.pairwise(run):
            assert span.start + span.padded_numel == following.start
        for span in run:
            assert span.start * span.dtype.itemsize % ALIGNMENT_BYTES == 0
            assert 0 <= span.padded_numel - span.numel < ALIGNMENT_BYTES // span.dtype.itemsize
        assert run[0].start == 0


@given(models(), segmentations, st.booleans())
def test_places_change_nothing_else(
    spans: list[ParameterSpan], segmentation: Segmentation, backward: bool
) -> None:
    by_name = {span.name: span for span in spans}
    for run in partition(spans, segmentation, backward=backward):
        for span in run:
            assert replace(span, start=0) == by_name[span.name]


def nbytes(run: list[ParameterSpan]) -> int:
    return sum(span.padded_numel * span.dtype.itemsize for span in run)


@given(models(), st.floats(1e-5, 1e-2), st.booleans())
def test_bytes_are_full_and_within_the_limit(
    spans: list[ParameterSpan], size_mb: float, backward: bool
) -> None:
    cut = partition(spans, Bytes(size_mb=size_mb), backward=backward)
    for run in cut:
        assert nbytes(run) <= size_mb * MIB or len(run) == 1 or nbytes(run[:1]) == nbytes(run)
    for run, following in itertools.pairwise(cut):
        if run[0].dtype == following[0].dtype:
            assert nbytes([*run, following[0]]) > size_mb * MIB, "another parameter would have fitted"


@given(models(), growing, st.booleans())
def test_each_segment_may_have_twice_the_last_one_s_bytes(
    spans: list[ParameterSpan], segmentation: Bytes, backward: bool
) -> None:
    """Against the limits written out: first_mb, its double, its fourfold, ... of each dtype, at most size_mb."""
    assert segmentation.first_mb is not None
    for dtype in DTYPES:
        cut = [run for run in partition(spans, segmentation, backward=backward) if run[0].dtype == dtype]
        limits = [min(2**n * segmentation.first_mb, segmentation.size_mb) * MIB for n in range(len(cut))]
        for run, limit in zip(cut, limits, strict=True):
            assert nbytes(run) <= limit or nbytes(run[:1]) == nbytes(run), "one parameter may be larger"
        for run, following, limit in zip(cut, cut[1:], limits, strict=False):
            assert nbytes([*run, following[0]]) > limit, "another parameter would have fitted"


@given(models(), sizes_mb, st.booleans())
def test_a_first_segment_of_full_size_changes_nothing(
    spans: list[ParameterSpan], size_mb: float, backward: bool
) -> None:
    assert partition(spans, Bytes(size_mb, first_mb=size_mb), backward=backward) == partition(
        spans, Bytes(size_mb), backward=backward
    )


@given(models(), st.booleans())
def test_layers_are_modules(spans: list[ParameterSpan], backward: bool) -> None:
    cut = partition(spans, Layers(), backward=backward)
    modules = [(run[0].name.rpartition(".")[0], run[0].dtype) for run in cut]
    assert len(set(modules)) == len(modules)
    for run, (module, _) in zip(cut, modules, strict=True):
        assert {span.name.rpartition(".")[0] for span in run} == {module}


@given(models(), st.booleans())
def test_model_is_one_segment_for_each_dtype(spans: list[ParameterSpan], backward: bool) -> None:
    assert len(partition(spans, Model(), backward=backward)) == len({span.dtype for span in spans})


def example() -> Iterator[tuple[str, torch.Tensor]]:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).named_parameters()


def test_an_example_by_hand() -> None:
    """3 x 5 floats take 16 places of 4 bytes, 5 take 16, 10 take 16, 2 take 16."""
    run = partition(named_spans(example()), Model())[0]
    assert [(span.name, span.start, span.numel, span.stop, span.shape, span.stride) for span in run] == [
        ("0.weight", 0, 15, 15, (5, 3), (3, 1)),
        ("0.bias", 16, 5, 21, (5,), (1,)),
        ("1.weight", 32, 10, 42, (2, 5), (5, 1)),
        ("1.bias", 48, 2, 50, (2,), (1,)),
    ]


@pytest.mark.parametrize(
    ("segmentation", "forward", "backward"),
    [
        (Model(), [4], [["1.bias", "1.weight", "0.bias", "0.weight"]]),
        (Layers(), [2, 2], [["1.bias", "1.weight"], ["0.bias", "0.weight"]]),
        (Bytes(size_mb=3 * 64 / MIB), [3, 1], [["1.bias", "1.weight", "0.bias"], ["0.weight"]]),
        (Bytes(size_mb=1 / MIB), [1, 1, 1, 1], [["1.bias"], ["1.weight"], ["0.bias"], ["0.weight"]]),
        (Bytes(1, first_mb=64 / MIB), [1, 2, 1], [["1.bias"], ["1.weight", "0.bias"], ["0.weight"]]),
    ],
)
def test_order_of_segments(segmentation: Segmentation, forward: list[int], backward: list[list[str]]) -> None:
    """Forward's segments begin with the first layer, backward's with the last, ready first."""
    spans = named_spans(example())
    assert [len(run) for run in partition(spans, segmentation)] == forward
    assert partition(spans, segmentation)[0][0].name == "0.weight"
    given_names = [[span.name for span in run] for run in partition(spans, segmentation, backward=True)]
    assert given_names == backward
