"""The discrete cosine transform of tiles, in which a few coefficients say most of a momentum.

A tile is a block of a matrix (`groups.sides_of`): with A and B the orthonormal DCT-II matrices of its sides, X becomes
A X B^T, and A^T Y B is X again. Coefficients lie tile after tile where a parameter's values lay.

Source: B. Peng, L. Heiden, D. P. Kingma, J. Quesnelle, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, and
its code. The residual of what is held is DeMo's momentum: as the transform is linear, it is kept in coefficients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hocket.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    SegmentShape,
    State,
    Wrapper,
    WrapperState,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hocket.api import ParameterSpan, Segment


@dataclass(frozen=True)
class Dct(Wrapper):
    """The cosine transform around a compressor, which then sends coefficients of tiles instead of values.

    Memory: a copy of the segment. A NaN spoils its tile.

    Attributes:
        tile: the longest side of a tile, 1 or more; 1 changes nothing.

    Raises:
        ValueError: `tile` is out of range, or the held compressor makes messages of sums or chooses of other tiles.
    """

    tile: int = 64

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise ValueError(f"tile must be 1 or more, not {self.tile}")
        if self.compressor.traits.answers:
            raise ValueError("the compressor already transforms the values itself: use it without dct")
        chosen_of = getattr(_innermost(self.compressor), "tile", 0)
        if chosen_of not in (0, self.tile):
            raise ValueError(
                f"tile is {self.tile}, but the compressor inside has tile {chosen_of}: give both the same"
            )

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, transforms=True)

    def init(self, segment: Segment) -> State:
        return _Transformed(segment, self.compressor)

    def compress(self, segment: Segment, state: Any, round: int) -> Message:
        """Return the message that the held compressor makes of the coefficients."""
        carrier: Segment = state.carrier
        for span in segment.spans:
            self._transform(segment.outgoing, carrier.outgoing, span)
        carrier.outgoing_trailer[:] = segment.outgoing_trailer
        carrier.stage_out()
        return replace(self.compressor.compress(carrier, state.inner, round), segment=segment)

    def to_values(self, segment: Segment, sums: Tensor) -> None:
        self.compressor.to_values(segment, sums)
        for span in segment.spans:
            self._transform_back(sums, span)

    def footprint(self, shape: SegmentShape) -> Footprint:
        """Return the other's, and the memory of coefficients."""
        held = self.compressor.footprint(shape)
        return replace(held, state_bytes=held.state_bytes + shape.wire_bytes)

    def _transform(self, values: Tensor, coefficients: Tensor, span: ParameterSpan) -> None:
        """Write the coefficients of a parameter of a flat buffer where it lies in another."""
        if not span.numel:
            return
        (rows, columns), tiles = self._cut(span)
        shaped = values.as_strided(span.shape, span.stride, values.storage_offset() + span.start)
        blocks = shaped.reshape(tiles).transpose(1, 2)
        left, right = _basis(rows, values.dtype, values.device), _basis(columns, values.dtype, values.device)
        coefficients[span.start : span.stop].view(blocks.shape).copy_(left @ blocks @ right.T)

    def _transform_back(self, flat: Tensor, span: ParameterSpan) -> None:
        if not span.numel:
            return
        (rows, columns), tiles = self._cut(span)
        blocks = flat[span.start : span.stop].view(tiles[0], tiles[2], rows, columns)
        left, right = _basis(rows, flat.dtype, flat.device), _basis(columns, flat.dtype, flat.device)
        values = (left.T @ blocks @ right).transpose(1, 2).reshape(span.shape)
        flat.as_strided(span.shape, span.stride, flat.storage_offset() + span.start).copy_(values)

    def _cut(self, span: ParameterSpan) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
        """Return a tile's sides, and a parameter's shape as rows of tiles of rows."""
        from hocket_diloco.groups import rows_and_columns, sides_of

        height, width = rows_and_columns(span)
        rows, columns = sides_of(span, self.tile)
        return (rows, columns), (height // rows, rows, width // columns, columns)


def _innermost(compressor: Compressor) -> Compressor:
    """Return the compressor that gives messages their form."""
    while isinstance(held := getattr(compressor, "compressor", None), Compressor):
        compressor = held
    return compressor


class _Transformed(WrapperState):
    """The coefficients, in a segment of their own, which the held compressor reads as the outgoing one."""

    def __init__(self, segment: Segment, compressor: Compressor) -> None:
        import torch

        from hocket.api import Segment

        values = torch.zeros_like(segment.outgoing)
        # Nothing is received into it.
        self.carrier = Segment(segment.name, segment.index, segment.spans, values, values)
        super().__init__(compressor.init(self.carrier))


@lru_cache(maxsize=256)
def _basis(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II matrix, [frequencies, places], computed in float64."""
    import torch

    place = torch.arange(side, dtype=torch.float64)
    matrix = torch.cos(math.pi / side * (place + 0.5) * place[:, None]) * math.sqrt(2 / side)
    matrix[0] /= math.sqrt(2)
    return matrix.to(dtype=dtype, device=device)
