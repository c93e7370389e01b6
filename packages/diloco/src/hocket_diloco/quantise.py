"""Values in 8, 4, 2 or 1 bits each, with a table for each group of them.

    bytes        content
    c * b        the trailer, in the segment's dtype
    g * t * b    for each group its table, in the segment's dtype
    ...          for each group the codes of its values, packed, the first in the lowest bits; each begins at a byte
    ceil(1.5 k)  within `diloco.chunk_topk`, the places of k values (see there)

c is the trailer's length, b the bytes of the segment's dtype, g the groups, t the numbers of a table.

Sources: INTELLECT-1, arXiv:2412.01152, section 2 (statistical: bins of 6 standard deviations, decoded to the means of
their members); "Streaming DiLoCo", arXiv:2501.18512 (E3M0); torchft (int8, a scale for each row); F. Seide et al.,
"1-Bit Stochastic Gradient Descent", Interspeech 2014 (signs).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from hocket.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Identity,
    Message,
    SegmentShape,
    State,
)
from hocket_diloco.chunk_topk import ChunkTopK

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array, Segment
    from hocket_diloco.groups import Groups


class Format(StrEnum):
    """Forms of a quantised value."""

    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    E3M0 = "e3m0"
    SIGN = "sign"


class Per(StrEnum):
    """Values that share a table."""

    TENSOR = "tensor"
    ROW = "row"
    CHUNK = "chunk"


_BITS = {Format.INT8: 8, Format.INT4: 4, Format.INT2: 2, Format.E3M0: 4, Format.SIGN: 1}


@dataclass(frozen=True)
class Quantise(Compressor):
    """Rounding of each value to one of a few levels of its group.

    - `int8`, `int4`, `int2`: whole multiples of a step, -127 to 127, -7 to 7 and -1 to 1; the largest magnitude is the
      largest multiple. What is 0 stays 0.
    - The same, statistical: 256, 16 or 4 bins, each of 6 standard deviations divided by their number, around the mean;
      the outer ones are open. A bin stands for the mean of its members.
    - `e3m0`: a sign and three bits of exponent: 0, or the largest magnitude times 1, 1/2 to 1/64; to the nearest.
    - `sign`: the mean magnitude with the value's sign.

    In every form the error is at most as large as the values (in the L2 norm of a group), so error feedback
    converges. A group with NaN or Inf arrives as NaN.

    Attributes:
        compressor: the choice of the values to quantise: `diloco.chunk_topk`, or `none` for all values.
        format: the form in which a value is sent.
        per: the values that share a table of levels: those of a parameter, of a row (a vector is one row), or of a run
            of `chunk` elements. With `diloco.chunk_topk`, `row` and `chunk` both mean the values sent of one of its
            chunks.
        chunk: the number of consecutive elements in a run, 8 or more.
        statistical: true: the levels are the means of bins of values.

    Raises:
        ValueError: the compressor is another one, `chunk` is too small, or the format has no statistical form.
    """

    compressor: Compressor = field(default_factory=Identity)
    format: Format = Format.INT8
    per: Per = Per.TENSOR
    chunk: int = 4096
    statistical: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Identity | ChunkTopK):
            raise ValueError(
                "quantise works only around compressor none or diloco.chunk_topk: choose one of them"
            )
        if self.chunk < 8:
            raise ValueError(f"chunk must be 8 or more, not {self.chunk}")
        if self.statistical and self.format in (Format.E3M0, Format.SIGN):
            raise ValueError(
                f"statistical does not work with {self.format}, whose levels are fixed: leave it out, or use format "
                "int8, int4 or int2"
            )

    @property
    def traits(self) -> CompressorTraits:
        chooses = isinstance(self.compressor, ChunkTopK)
        return CompressorTraits(
            reducible=False, same_coordinates=not chooses, leaves_out=chooses, coarse=True
        )

    @property
    def _bits(self) -> int:
        return _BITS[self.format]

    @property
    def _table_numel(self) -> int:
        return 1 << self._bits if self.statistical else 1

    @property
    def _kind(self) -> int:
        from hocket_diloco import kernels

        if self.statistical:
            return kernels.STATISTICAL
        return {Format.E3M0: kernels.E3M0, Format.SIGN: kernels.SIGN}.get(self.format, kernels.INT)

    def _groups(self, shape: SegmentShape) -> Groups:
        """Return the groups of the quantised values."""
        from hocket_diloco.groups import rows_of, runs_of, tensors_of

        spans = tuple(shape.spans)
        if isinstance(self.compressor, ChunkTopK):
            chunks = self.compressor.chunks(shape)
            return chunks.of_tensors if self.per is Per.TENSOR else chunks.of_chunks
        if self.per is Per.CHUNK:
            return runs_of(spans, self.chunk)
        return tensors_of(spans) if self.per is Per.TENSOR else rows_of(spans)

    def init(self, segment: Segment) -> State:
        return _Coded(self, segment)

    def compress(self, segment: Segment, state: _Coded, round: int) -> Message:
        """Return the groups' tables and codes."""
        from hocket_diloco import kernels
        from hocket_diloco.groups import keys_of

        trailer, tables, packed, places = self._parts(state.payload, segment)
        trailer[:] = segment.outgoing_trailer
        values = segment.outgoing_array[: segment.numel]
        if isinstance(self.compressor, ChunkTopK):
            values = state.chosen
            self.compressor.choose(segment, values, places)
        groups = self._groups(segment)
        keys, mask, infinity = keys_of(values)
        kernels.encode(
            self._kind,
            self._bits,
            values,
            keys,
            mask,
            infinity,
            groups.starts,
            groups.lengths,
            tables,
            packed,
        )
        return Message(state.payload, segment, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add weight * message to `out`.

        Raises:
            IndexError: a place beyond its chunk.
        """
        from hocket_diloco.groups import add_on_host

        segment = message.segment
        trailer, tables, packed, places = self._parts(message.payload, segment)
        if isinstance(self.compressor, ChunkTopK):
            chosen = np.zeros(self.compressor.chunks(segment).total, tables.dtype)
            self._decode(segment, tables, packed, 1.0, chosen)
            self.compressor.add(segment, chosen, places, trailer, weight, out)
        else:
            add_on_host(
                out,
                segment,
                trailer,
                weight,
                lambda dense: self._decode(segment, tables, packed, weight, dense),
            )

    def _decode(self, segment: Segment, tables: Array, packed: Array, weight: float, out: Array) -> None:
        from hocket_diloco import kernels

        groups = self._groups(segment)
        rounded = out.dtype.type(weight)
        kernels.decode(self._kind, self._bits, tables, packed, rounded, groups.starts, groups.lengths, out)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        """Set the sent values to 0: rounding errors are small, or fed back."""
        if isinstance(self.compressor, ChunkTopK):
            _, tables, _, places = self._parts(message.payload, message.segment)
            self.compressor.clear(message.segment, tables[:0, 0], places, out)
        else:
            out.zero_()

    def footprint(self, shape: SegmentShape) -> Footprint:
        """Return the bytes of trailer, tables, codes and places; the message's memory is kept, and chosen values."""
        sizes = self._sizes(shape)
        chosen = self._chosen(shape) * shape.dtype.itemsize
        return Footprint.of(sum(sizes), state_bytes=sum(sizes) + chosen)

    def _sizes(self, shape: SegmentShape) -> tuple[int, int, int, int]:
        """Return the bytes of each part of a message."""
        groups = self._groups(shape)
        tables = len(groups.starts) * self._table_numel * shape.dtype.itemsize
        codes = int((-(-groups.lengths * self._bits // 8)).sum())
        chooses = isinstance(self.compressor, ChunkTopK)
        return shape.trailer_bytes, tables, codes, -(-3 * self._chosen(shape) // 2) if chooses else 0

    def _chosen(self, shape: SegmentShape) -> int:
        return self.compressor.chunks(shape).total if isinstance(self.compressor, ChunkTopK) else 0

    def _parts(self, payload: Array, segment: Segment) -> tuple[Array, Array, Array, Array]:
        """Return views of a payload: trailer, tables [groups, numbers], codes, places."""
        dtype = segment.outgoing_array.dtype
        ends = np.cumsum(self._sizes(segment)).tolist()
        parts = [payload[first:last] for first, last in zip([0, *ends], ends, strict=False)]
        tables = parts[1].view(dtype).reshape(-1, self._table_numel)
        return parts[0].view(dtype), tables, parts[2], parts[3]


class _Coded(State):
    """The message's memory, and that of chosen values."""

    def __init__(self, compressor: Quantise, segment: Segment) -> None:
        self.payload: Array = np.empty(compressor.footprint(segment).longest_bytes, np.uint8)
        self.chosen: Array = np.empty(compressor._chosen(segment), segment.outgoing_array.dtype)
