"""Sparse messages, and top-k: the largest values travel, the others do not.

A sparse message is one buffer, which travels in one gather:

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

from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    SparseValues,
    State,
    count_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape

_COUNT_BYTES = 8
#: Bytes of an element's place in its segment, int32.
INDEX_BYTES = 4


def sparse_bytes(shape: SegmentShape, count: int) -> int:
    """Return the bytes of a message with `count` elements."""
    element = shape.dtype.itemsize + INDEX_BYTES
    nbytes = _COUNT_BYTES + shape.trailer_bytes + count * element
    return -(-nbytes // 8) * 8


def pack_sparse(segment: Segment, values: Array, indices: Array) -> Array:
    """Return a payload, uint8, with the segment's outgoing trailer.

    Args:
        segment: the segment of these elements.
        values: [k], of the segment's dtype.
        indices: [k], integers, each from 0 to numel - 1 and at most once.
    """
    payload = np.zeros(sparse_bytes(segment, len(values)), dtype=np.uint8)
    payload[:_COUNT_BYTES].view(np.int64)[0] = len(values)
    parts = _parts(payload, segment, len(values))
    parts.trailer[:] = segment.outgoing_trailer
    parts.values[:] = values
    parts.indices[:] = indices
    return payload


def unpack_sparse(message: Message) -> SparseValues:
    """Return the content of a sparse message; other bytes may follow its payload.

    Raises:
        ValueError: the payload is shorter than it says.
    """
    header = message.payload[:_COUNT_BYTES]
    count = int(header.view(np.int64)[0]) if len(header) == _COUNT_BYTES else 0
    needed = sparse_bytes(message.segment, max(count, 0))
    if count < 0 or len(message.payload) < needed:
        raise ValueError(
            f"a message of {len(message.payload)} bytes for {message.segment.name} claims to hold {count} elements, "
            f"which need {needed} bytes, so it is damaged or from another version: check that all ranks run the same "
            "hocket-core"
        )
    return _parts(message.payload, message.segment, count)


def add_sparse(message: Message, weight: float, out: Tensor) -> None:
    """Add a sparse message to a dense buffer, for `Compressor.accumulate`.

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
    """Zero the elements that a sparse message carries, for `Compressor.clear_sent`."""
    import torch

    out.index_fill_(0, torch.from_numpy(unpack_sparse(message).indices).to(out.device).long(), 0)


def _parts(payload: Array, segment: Segment, count: int) -> SparseValues:
    dtype = segment.outgoing_array.dtype
    values_start = _COUNT_BYTES + segment.trailer_bytes
    indices_start = values_start + count * dtype.itemsize
    indices_stop = indices_start + count * INDEX_BYTES
    return SparseValues(
        trailer=payload[_COUNT_BYTES:values_start].view(dtype),
        values=payload[values_start:indices_start].view(dtype),
        indices=payload[indices_start:indices_stop].view(np.int32),
    )


class _Padding(State):
    """The indices of a segment's padding, which is never chosen: int64 [n], on the segment's device."""

    def __init__(self, segment: Segment) -> None:
        import torch

        padding = [torch.arange(span.stop, span.start + span.padded_numel) for span in segment.spans]
        self.indices = torch.cat(padding).to(segment.outgoing.device)


@dataclass(frozen=True)
class TopK(Compressor):
    """Exact top-k by magnitude over the segment as a whole.

    k = density * numel, padding not counted, and at least 1. Unsent values are lost; with `error_feedback` around it,
    they are sent later. Each rank chooses coordinates of its own, so messages are gathered. For k per layer, cut the
    model by layers.

    Attributes:
        density: the share of elements to send, above 0 and at most 1.

    Raises:
        ValueError: the density is not in its range.

    Source: D. Alistarh et al., "The Convergence of Sparsified Gradient Methods", NeurIPS 2018, algorithm 1.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {self.density}")

    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=False, same_coordinates=False, leaves_out=True, selects=True)

    def init(self, segment: Segment) -> State:
        segment.check_indexable()
        return _Padding(segment)

    def compress(self, segment: Segment, state: _Padding, round: int) -> Message:
        """Return the message of the k largest values; of equal ones, those with the lowest indices."""
        data = segment.outgoing[: segment.numel]
        count = self.num_selected(segment)
        indices, values = largest(data, count, state.indices)
        return Message(pack_sparse(segment, values, indices), segment, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        add_sparse(message, weight, out)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        clear_sparse(message, out)

    def read(self, message: Message) -> SparseValues:
        return unpack_sparse(message)

    def num_selected(self, shape: SegmentShape) -> int:
        return count_of(self.density, sum(span.numel for span in shape.spans))

    def footprint(self, shape: SegmentShape) -> Footprint:
        return Footprint.of(sparse_bytes(shape, self.num_selected(shape)))


def largest(data: Tensor, count: int, left_out: Tensor | None = None) -> tuple[Array, Array]:
    """Return indices, ascending, and values of the `count` elements of largest magnitude, in host memory.

    Of equal magnitudes the lowest indices are taken, so the choice is the same on every machine. NaN counts as
    larger than everything.

    Args:
        data: [n], on any device.
        count: 0 to n, those left out not counted.
        left_out: indices, int64, of elements that are not taken, on data's device.

    Returns:
        indices [count], int64, and values [count], of data's dtype.
    """
    import torch

    if data.device.type == "cpu":
        array = data.numpy()
        sizes = np.abs(array)
        if left_out is not None:
            sizes[left_out.numpy()] = -1.0
        indices = largest_places(sizes, count)
        return indices, array[indices]
    magnitudes = data.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    if left_out is not None:
        magnitudes.index_fill_(0, left_out, -1.0)
    threshold = torch.topk(magnitudes, count).values[-1:] if count else magnitudes[:0]
    # The same rule as on the CPU, on the few that are left.
    few = torch.nonzero(magnitudes >= threshold)[:, 0] if count else threshold.long()
    chosen = few[torch.from_numpy(largest_places(magnitudes[few].cpu().numpy(), count)).to(few.device)]
    return chosen.cpu().numpy(), data[chosen].cpu().numpy()


def largest_places(magnitudes: Array, count: int) -> Array:
    """Return the ascending indices of the `count` largest, int64 [count].

    NaN is the largest; of equal ones the first are taken."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    # Selecting the threshold alone, in place and vectorised, is some 40 times faster than torch.topk.
    place = len(magnitudes) - count
    threshold = np.partition(magnitudes, place)[place]
    # Not "at least": NaN, which partition puts last, passes too.
    passing = np.flatnonzero(~(magnitudes < threshold))
    if len(passing) > count:
        above = magnitudes[passing] != threshold
        passing = np.sort(np.concatenate([passing[above], passing[~above]])[:count])
    return passing
