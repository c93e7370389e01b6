"""The flat buffers: parameters keep values and strides, slices are contiguous and share the memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hocket.segment.partition import ALIGNMENT_BYTES, Bytes, Layers, Model, Segmentation, partition
from hocket.segment.segment import Segment, allocate, view_of
from hocket.segment.shape import wire_dtype
from hocket.segment.storage import ParameterStorage
from hocket.transport.single import SinglePeer

SHAPES = st.lists(st.integers(0, 5), max_size=4)
SEGMENTATIONS = [Model(), Layers(), Bytes(size_mb=1e-4)]


def permuted(shape: list[int], order: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a dense tensor whose dimensions lie in memory in another order."""
    return (
        torch.randn([shape[i] for i in order]).to(dtype).permute([order.index(i) for i in range(len(shape))])
    )


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    model = nn.Module()
    for number in range(draw(st.integers(1, 6))):
        shape = draw(SHAPES)
        order = draw(st.permutations(range(len(shape))))
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
        parameter = nn.Parameter(
            permuted(shape, list(order), dtype), requires_grad=draw(st.integers(0, 4)) > 0
        )
        model.register_parameter(f"p{number}", parameter)
    return model


@given(models(), st.sampled_from(SEGMENTATIONS))
def test_parameters_become_views_with_their_values_and_strides(
    model: nn.Module, segmentation: Segmentation
) -> None:
    before = {name: (p.detach().clone(), p.stride(), p) for name, p in model.named_parameters()}
    storage = ParameterStorage(model, SinglePeer())
    places = [range(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in storage.flats]
    for name, parameter in model.named_parameters():
        values, stride, same = before[name]
        assert parameter is same
        assert torch.equal(parameter, values)
        assert parameter.stride() == stride
        if parameter.numel():
            assert any(parameter.data_ptr() in place for place in places) == parameter.requires_grad
        if parameter.requires_grad:
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        if parameter.requires_grad and parameter.numel():
            assert parameter.data_ptr() % ALIGNMENT_BYTES == 0
    storage.check(take_values=True)
    for run in partition(storage.spans, segmentation):
        [(_, piece)] = storage.pieces_of(run)
        assert piece.is_contiguous()
        for span in run:
            view, parameter = view_of(piece, span), storage.parameters[span.name]
            assert (view.data_ptr(), view.stride(), view.shape) == (
                parameter.data_ptr(),
                parameter.stride(),
                parameter.shape,
            )


@pytest.mark.parametrize("segmentation", SEGMENTATIONS)
def test_slices_cover_the_storage_without_overlap(segmentation: Segmentation) -> None:
    model = nn.Sequential(
        nn.Linear(9, 7), nn.Conv2d(3, 2, 3), nn.Linear(4, 4, dtype=torch.float64), nn.Linear(1, 1)
    )
    storage = ParameterStorage(model, SinglePeer())
    pieces = [piece for run in partition(storage.spans, segmentation) for _, piece in storage.pieces_of(run)]
    places = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in pieces)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    assert sum(piece.numel() for piece in pieces) == sum(flat.numel() for flat in storage.flats)


def test_channels_last_stays_channels_last() -> None:
    model = nn.Conv2d(4, 3, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's, left out
    storage = ParameterStorage(model, SinglePeer())
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    gradient = view_of(torch.zeros_like(storage.flats[0]), storage.spans[0])
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_shared_parameters_lie_in_one_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    storage = ParameterStorage(model, SinglePeer())
    assert list(storage.parameters) == ["0.weight"]
    assert storage.flats[0].numel() == 16
    storage.check(take_values=True)


def test_padding_is_zero() -> None:
    storage = ParameterStorage(nn.Linear(3, 5), SinglePeer())
    flat = storage.flats[0]
    assert flat.numel() == 32
    assert not flat[15:16].any()
    assert not flat[21:].any()


@pytest.mark.parametrize(
    ("dtype", "on_the_wire"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_wire_dtype(dtype: torch.dtype, on_the_wire: torch.dtype) -> None:
    assert wire_dtype(dtype) == on_the_wire


def test_a_segments_arrays_are_its_buffers() -> None:
    storage = ParameterStorage(nn.Linear(3, 5), SinglePeer())
    run = partition(storage.spans, Model())[0]
    outgoing, incoming = (
        allocate(SinglePeer(), 32 + 3, torch.float32, torch.device("cpu")) for _ in range(2)
    )
    segment = Segment("gradients.0[0]", 0, run, outgoing, incoming)
    assert (segment.numel, segment.trailer_numel, segment.wire_bytes) == (32, 3, 140)
    segment.outgoing_trailer[:] = 7
    incoming[-3:] = 5
    assert torch.equal(outgoing, torch.cat([torch.zeros(32), torch.full((3,), 7.0)]))
    assert np.array_equal(segment.incoming_trailer, [5, 5, 5])
    segment.stage_out()
    segment.stage_in()
    assert repr(segment) == "<Segment gradients.0[0]: 2 parameters, 140 bytes>"
