"""Groups: the parts of a segment by which values are quantised or chosen, and what their messages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array, ParameterSpan, Segment


@dataclass(frozen=True, eq=False)
class Groups:
    """Runs of values, one after the other.

    Attributes:
        starts, lengths: int64 [groups], in elements.
    """

    starts: Array
    lengths: Array

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]] | Array) -> Groups:
        """Return the groups of pairs (start, length), those without an element left out."""
        pairs = np.asarray(runs, np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 1] > 0]
        return cls(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))


# A segment's spans stay as long as it does; a model has some hundreds of segments.
@lru_cache(maxsize=1024)
def tensors_of(spans: tuple[ParameterSpan, ...]) -> Groups:
    """Return a group for each parameter."""
    return Groups.of([(span.start, span.numel) for span in spans])


@lru_cache(maxsize=1024)
def rows_of(spans: tuple[ParameterSpan, ...]) -> Groups:
    """Return a group for each first index of a matrix or more, and for each vector."""
    return _cut(spans, lambda span: math.prod(span.shape[1:]) if len(span.shape) > 1 else span.numel)


@lru_cache(maxsize=1024)
def runs_of(spans: tuple[ParameterSpan, ...], length: int) -> Groups:
    """Return groups of so many elements of a parameter each; its last has what is left."""
    return _cut(spans, lambda _span: length)


def sides_of(span: ParameterSpan, longest: int) -> tuple[int, int]:
    """Return the sides of a parameter's tiles, the largest divisors up to `longest` of the sides of its matrix.

    Vectors have tiles of one row; of tensors with more dimensions all but the first are taken as one.
    """
    height, width = rows_and_columns(span)
    return _divisor(height, longest), _divisor(width, longest)


def rows_and_columns(span: ParameterSpan) -> tuple[int, int]:
    """Return the sides of the matrix that a parameter is cut into tiles as."""
    shape = span.shape if len(span.shape) > 1 else (1, *span.shape)
    return shape[0], math.prod(shape[1:])


def _divisor(length: int, longest: int) -> int:
    return max(side for side in range(1, min(length, longest) + 1) if length % side == 0)


@lru_cache(maxsize=1024)
def tiles_of(spans: tuple[ParameterSpan, ...], longest: int) -> Groups:
    """Return a group for each tile, where they lie one after the other in a parameter's place."""
    return _cut(spans, lambda span: math.prod(sides_of(span, longest)))


def _cut(spans: Sequence[ParameterSpan], length_of: Callable[[ParameterSpan], int]) -> Groups:
    """Return groups of `length_of` elements of each parameter; its last has what is left."""
    runs = [np.empty((0, 2), np.int64)]
    for span in spans:
        if span.numel:
            length = length_of(span)
            starts = np.arange(span.start, span.stop, length)
            runs.append(np.stack([starts, np.minimum(length, span.stop - starts)], axis=1))
    return Groups.of(np.concatenate(runs))


def keys_of(values: Array) -> tuple[Array, Any, Any]:
    """Return values' bits as integers, all bits but the sign's, and the bits of Inf."""
    integer = np.dtype(f"i{values.itemsize}")
    infinity = np.array(np.inf, values.dtype).view(integer)[()]
    return values.view(integer), integer.type(np.iinfo(integer).max), infinity


def add_on_host(
    out: Tensor, segment: Segment, trailer: Array, weight: float, add: Callable[[Array], None]
) -> None:
    """Add to `out` what `add` adds to an array [numel], and weight times a trailer."""
    import torch

    numel = segment.numel
    if out.device.type == "cpu":
        add(out.detach()[:numel].numpy())
    else:
        values = torch.zeros(numel, dtype=out.dtype)
        add(values.numpy())
        out[:numel].add_(values.to(out.device))
    out[numel:].add_(torch.from_numpy(trailer).to(out.device), alpha=weight)
