"""Shared random coordinates: the same ones travel on every rank, without indices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hocket import draws
from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    State,
    count_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape


@dataclass(frozen=True)
class SharedRandom(Compressor):
    """A random choice of k = density * numel elements by (seed, round, segment), the same on every rank.

    The segment is cut into k runs of equal length, to one, and a coordinate is drawn uniformly from each: k
    draws for k different coordinates, in order, each element with chance 1 over its run's length. The payload
    holds their values and then the trailer, in the segment's dtype; it is reducible.

    - In `parameters`: where all ranks exchange a coordinate it is mixed by the topology's W, and where none does
      it stays. So each coordinate's mixing matrix is W or I, doubly stochastic like W; the mean is kept and
      consensus reached, in about 1/density times as many rounds.
    - In `gradients`: values are not scaled up, so a round's expectation is density times the gradient. With
      `error_feedback` around it everything is sent, later.

    Attributes:
        density: the share of elements to send, above 0 and at most 1.
        seed: the seed of the draws, 0 to 2**64 - 1; the same on every rank.

    Raises:
        ValueError: density or seed is not in its range.
    """

    density: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {self.density}")
        draws.check_seed(self.seed)

    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True, leaves_out=True)

    def compress(self, segment: Segment, state: State, round: int) -> Message:
        """Return the values of this round's coordinates."""
        data = segment.outgoing[: segment.numel]
        values = data[self._indices(segment, round).to(data.device)].cpu().numpy()
        return Message(np.concatenate([values, segment.outgoing_trailer]), segment, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add weight * message to `out` where its round's coordinates are, and to the trailer."""
        import torch

        numel, trailer_numel = message.segment.numel, message.segment.trailer_numel
        payload = torch.from_numpy(message.payload).to(out.device)
        count = len(payload) - trailer_numel
        indices = self._indices(message.segment, message.round).to(out.device)
        out[:numel].index_add_(0, indices, payload[:count], alpha=weight)
        out[numel:].add_(payload[count:], alpha=weight)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        out.index_fill_(0, self._indices(message.segment, message.round).to(out.device), 0)

    def footprint(self, shape: SegmentShape) -> Footprint:
        values_bytes = count_of(self.density, shape.numel) * shape.dtype.itemsize
        return Footprint.of(values_bytes + shape.trailer_bytes)

    def _indices(self, segment: Segment, round: int) -> Tensor:
        count = count_of(self.density, segment.numel)
        return _draw(segment.numel, count, self.seed, round, segment.index)


# One draw serves compress and each of a round's messages; the segments of a round may take turns.
@lru_cache(maxsize=4)
def _draw(numel: int, count: int, seed: int, round: int, segment: int) -> Tensor:
    """Return `count` different coordinates of 0 to numel - 1, int64 [count], ascending; not to be changed."""
    import torch

    # Run r begins at floor(r * numel / count).
    starts = np.arange(count + 1, dtype=np.int64) * numel // max(count, 1)
    return torch.from_numpy(starts[:-1] + draws.below(np.diff(starts), "shared", seed, round, segment))
