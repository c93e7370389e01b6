"""Top-k of chunks: the largest values of each run of 4096, or of each tile, with places in 12 bits.

    bytes        content
    c * b        the trailer, in the segment's dtype
    k * b        the values, in the segment's dtype, by chunk and in the order of their places
    ceil(1.5 k)  their places in their chunks, two in three bytes, the first in the lowest bits

c is the trailer's length, b the bytes of the segment's dtype, k the sum of what is chosen of each chunk.

Source: A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706. There
chunks are tiles of 64 x 64 in matrices; here they are runs of 4096 elements everywhere. Cosine coefficients
(`diloco.dct`) lie tile after tile, so that there a chunk may be a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hocket.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    SegmentShape,
    State,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array, ParameterSpan, Segment
    from hocket_diloco.groups import Groups

#: The number of places that 12 bits can hold.
LARGEST_CHUNK = 4096
_LONGEST_TILE = 64


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a segment.

    Attributes:
        runs: their places in the segment.
        counts: int64 [chunks], the number of elements chosen of each.
        total: the sum of `counts`.
        of_tensors, of_chunks: the runs of each parameter and of each chunk among what is chosen.
    """

    runs: Groups
    counts: Array
    total: int
    of_tensors: Groups
    of_chunks: Groups

    @property
    def index_bytes(self) -> int:
        """The bytes of the places."""
        return -(-3 * self.total // 2)


@dataclass(frozen=True)
class ChunkTopK(Compressor):
    """The `k` values of largest magnitude in each `chunk` elements of a parameter; among equal values, the first.

    A parameter's last chunk, which may be shorter, sends the same share of its elements, rounded up. What is not sent
    is gone; with `error_feedback` around it, it is sent later. Within `diloco.quantise` values travel in fewer bits.

    Attributes:
        chunk: the number of elements in a chunk, 1 to 4096.
        k: elements to send of each chunk, 1 to `chunk`.
        tile: the `tile` of the `diloco.dct` around it, up to 64; 0 if there is none. With 0, chunks are runs of
            `chunk` elements. Otherwise each tile is a chunk, whatever its size: `k` of its elements are sent, or all
            of them if it has fewer.

    Raises:
        ValueError: a field is not in its range.
    """

    chunk: int = LARGEST_CHUNK
    k: int = 64
    tile: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.tile <= _LONGEST_TILE:
            raise ValueError(f"tile must be 0 to {_LONGEST_TILE}, not {self.tile}, as indices have 12 bits")
        if not 1 <= self.chunk <= LARGEST_CHUNK:
            raise ValueError(f"chunk must be 1 to {LARGEST_CHUNK}, not {self.chunk}, as indices have 12 bits")
        if not 1 <= self.k <= self.chunk:
            raise ValueError(f"k must be 1 to {self.chunk} (the elements of a chunk), not {self.k}")

    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=False, same_coordinates=False, leaves_out=True)

    def chunks(self, shape: SegmentShape) -> Chunks:
        """Return the chunks of a segment."""
        return _chunks(tuple(shape.spans), self)

    def init(self, segment: Segment) -> State:
        return _Sparse(self.footprint(segment).longest_bytes)

    def compress(self, segment: Segment, state: _Sparse, round: int) -> Message:
        """Return the chosen values and their places."""
        trailer, values, places = self._parts(state.payload, segment)
        trailer[:] = segment.outgoing_trailer
        self.choose(segment, values, places)
        return Message(state.payload, segment, round)

    def choose(self, segment: Segment, values: Array, places: Array) -> None:
        """Write the chosen values of a segment and their packed places."""
        from hocket_diloco import chunk_kernels
        from hocket_diloco.groups import keys_of

        chunks = self.chunks(segment)
        data = segment.outgoing_array[: segment.numel]
        keys, mask, _ = keys_of(data)
        chunk_kernels.choose(
            data, keys, mask, chunks.runs.starts, chunks.runs.lengths, chunks.counts, values, places
        )

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add weight * message to `out` where its elements are.

        Raises:
            IndexError: a place beyond its chunk.
        """
        trailer, values, places = self._parts(message.payload, message.segment)
        self.add(message.segment, values, places, trailer, weight, out)

    def add(
        self, segment: Segment, values: Array, places: Array, trailer: Array, weight: float, out: Tensor
    ) -> None:
        """Add weight times values to `out` at packed places, and to the trailer."""
        from hocket_diloco.groups import add_on_host

        def add(dense: Array) -> None:
            self._add(segment, values, places, weight, dense, clear=False)

        add_on_host(out, segment, trailer, weight, add)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        _, values, places = self._parts(message.payload, message.segment)
        self.clear(message.segment, values, places, out)

    def clear(self, segment: Segment, values: Array, places: Array, out: Tensor) -> None:
        """Set the elements of `out` to 0 that lie at packed places."""
        kept = out.detach().cpu()
        self._add(segment, values, places, 0.0, kept.numpy(), clear=True)
        out.copy_(kept)

    def _add(
        self, segment: Segment, values: Array, places: Array, weight: float, dense: Array, *, clear: bool
    ) -> None:
        from hocket_diloco import chunk_kernels

        chunks = self.chunks(segment)
        runs, rounded = chunks.runs, dense.dtype.type(weight)
        if not chunk_kernels.add_chunks(
            values, places, rounded, runs.starts, runs.lengths, chunks.counts, dense, clear
        ):
            raise IndexError(
                f"a message for {segment.name} has an index beyond its chunk of {self.tile**2 or self.chunk} "
                "elements, so it is damaged or from another version: check that all ranks run the same hocket-diloco"
            )

    def footprint(self, shape: SegmentShape) -> Footprint:
        """Return the bytes of values, places and trailer; the message's memory is kept."""
        chunks = self.chunks(shape)
        nbytes = shape.trailer_bytes + chunks.total * shape.dtype.itemsize + chunks.index_bytes
        return Footprint.of(nbytes, state_bytes=nbytes)

    def _parts(self, payload: Array, segment: Segment) -> tuple[Array, Array, Array]:
        """Return views of a payload: trailer, values, places."""
        dtype, chunks = segment.outgoing_array.dtype, self.chunks(segment)
        first = segment.trailer_bytes
        last = first + chunks.total * dtype.itemsize
        end = last + chunks.index_bytes
        return payload[:first].view(dtype), payload[first:last].view(dtype), payload[last:end]


class _Sparse(State):
    """The message's memory."""

    def __init__(self, nbytes: int) -> None:
        self.payload: Array = np.empty(nbytes, np.uint8)


@lru_cache(maxsize=1024)
def _chunks(spans: tuple[ParameterSpan, ...], compressor: ChunkTopK) -> Chunks:
    from hocket_diloco.groups import Groups, runs_of, tiles_of

    if compressor.tile:
        runs = tiles_of(spans, compressor.tile)
        counts = np.minimum(runs.lengths, compressor.k)
    else:
        runs = runs_of(spans, compressor.chunk)
        counts = -(-runs.lengths * compressor.k // compressor.chunk)
    ends = np.cumsum(counts)
    of_chunks = Groups(ends - counts, counts)
    bounds = np.concatenate([[0], ends])
    # Chunks lie in the order of their parameters.
    stops = bounds[np.searchsorted(runs.starts, [span.start + span.padded_numel for span in spans])]
    starts = np.concatenate([[0], stops[:-1]])
    of_tensors = Groups.of(list(zip(starts.tolist(), (stops - starts).tolist(), strict=True)))
    return Chunks(runs, counts, int(counts.sum()), of_tensors, of_chunks)
