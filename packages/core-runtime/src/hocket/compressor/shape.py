"""What follows from a segment's spans: how many numbers it has, and of which dtype on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.compressor.api import SegmentShape

if TYPE_CHECKING:
    import torch

__all__ = ["trailer_bytes", "count_of", "dtype_of", "numel_of", "unpadded_numel_of"]


def numel_of(shape: SegmentShape) -> int:
    """Return how many numbers of data a segment has, padding included."""
    last = shape.spans[-1]
    return last.start + last.padded_numel


def unpadded_numel_of(shape: SegmentShape) -> int:
    """Return how many numbers a segment's parameters have together."""
    return sum(span.numel for span in shape.spans)


def dtype_of(shape: SegmentShape) -> torch.dtype:
    """Return the dtype of a segment's buffers: float32, or float64 where its parameters are."""
    from hocket.segment.segment import wire_dtype

    return wire_dtype(shape.spans[0].dtype)


def trailer_bytes(shape: SegmentShape) -> int:
    """Return how many bytes a segment's trailer takes."""
    return shape.trailer_numel * dtype_of(shape).itemsize


def count_of(density: float, numel: int) -> int:
    """Return k, how many of `numel` elements a density means: the nearest whole number, but one at least."""
    return min(numel, max(1, round(density * numel)))
