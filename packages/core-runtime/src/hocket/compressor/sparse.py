"""The message of a sparse compressor: how many, which and what, packed in one buffer that travels in one gather.

    bytes        content
    8            k, how many elements, int64
    c * b        the trailer, in the segment's dtype
    k * b        the values, in the segment's dtype
    k * 4        their indices in the segment, int32, each at most once
    0 to 7       up to a multiple of 8

c is the trailer's length, b the bytes of the segment's dtype, 4 or 8. Numbers are in the machine's own
byte order. The buffer says itself how long it is, so it may be received into a longer one.

Source: Fang et al., "RedSync", section 2.3 (length, indices and values in one message).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hocket.compressor.api import Message, SegmentShape
from hocket.compressor.shape import dtype_of, numel_of, trailer_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.segment.segment import Segment

__all__ = [
    "SparseValues",
    "add_sparse",
    "check_indexable",
    "clear_sparse",
    "pack_sparse",
    "sparse_bytes",
    "unpack_sparse",
]

_HEADER_BYTES = 8
_INDEX_BYTES = 4


@dataclass(frozen=True, eq=False)
class SparseValues:
    """A sparse message, read: views of its payload.

    Attributes:
        trailer: [trailer_numel], of the segment's dtype.
        values: [k], of the segment's dtype.
        indices: [k], int32.
    """

    trailer: Array
    values: Array
    indices: Array


def sparse_bytes(shape: SegmentShape, count: int) -> int:
    """Return the bytes of a message with `count` elements."""
    element = dtype_of(shape).itemsize + _INDEX_BYTES
    nbytes = _HEADER_BYTES + trailer_bytes(shape) + count * element
    return -(-nbytes // 8) * 8


def check_indexable(shape: SegmentShape) -> None:
    """Refuse a segment that is too long for its indices.

    Raises:
        ValueError: 2**31 elements or more.
    """
    if numel_of(shape) >= 2**31:
        raise ValueError(
            f"a segment of {numel_of(shape)} elements has indices beyond int32: cut the model into smaller ones "
            "(segments: layers or bytes)"
        )


def pack_sparse(segment: Segment, values: Array, indices: Array) -> Array:
    """Return a payload, uint8, with the segment's outgoing trailer.

    Args:
        segment: whose elements they are.
        values: [k], of the segment's dtype.
        indices: [k], integers, each from 0 to numel - 1 and at most once.
    """
    payload = np.zeros(sparse_bytes(segment, len(values)), dtype=np.uint8)
    payload[:_HEADER_BYTES].view(np.int64)[0] = len(values)
    parts = _parts(payload, segment, len(values))
    parts.trailer[:] = segment.outgoing_trailer
    parts.values[:] = values
    parts.indices[:] = indices
    return payload


def unpack_sparse(message: Message) -> SparseValues:
    """Return what a sparse message holds; its payload may be followed by other bytes.

    Raises:
        ValueError: the payload is shorter than it says.
    """
    header = message.payload[:_HEADER_BYTES]
    count = int(header.view(np.int64)[0]) if len(header) == _HEADER_BYTES else 0
    needed = sparse_bytes(message.segment, max(count, 0))
    if count < 0 or len(message.payload) < needed:
        raise ValueError(
            f"a message of {len(message.payload)} bytes for {message.segment.name} says that it holds {count} "
            f"elements, which take {needed}"
        )
    return _parts(message.payload, message.segment, count)


def add_sparse(message: Message, weight: float, out: Tensor) -> None:
    """Add a sparse message to a dense buffer: what `Compressor.accumulate` asks of one.

    Raises:
        ValueError: the payload is shorter than it says.
        IndexError: an index beyond the segment.
    """
    import torch

    parts = unpack_sparse(message)
    numel = message.segment.numel
    indices, values, trailer = (
        torch.from_numpy(part).to(out.device) for part in (parts.indices, parts.values, parts.trailer)
    )
    out[:numel].index_add_(0, indices, values, alpha=weight)
    out[numel:].add_(trailer, alpha=weight)


def clear_sparse(message: Message, out: Tensor) -> None:
    """Set the elements to 0 that a sparse message carries: what `Compressor.clear_sent` asks of one."""
    import torch

    out.index_fill_(0, torch.from_numpy(unpack_sparse(message).indices).to(out.device).long(), 0)


def _parts(payload: Array, segment: Segment, count: int) -> SparseValues:
    dtype = segment.outgoing_array.dtype
    values_start = _HEADER_BYTES + trailer_bytes(segment)
    indices_start = values_start + count * dtype.itemsize
    indices_stop = indices_start + count * _INDEX_BYTES
    return SparseValues(
        trailer=payload[_HEADER_BYTES:values_start].view(dtype),
        values=payload[values_start:indices_start].view(dtype),
        indices=payload[indices_start:indices_stop].view(np.int32),
    )
