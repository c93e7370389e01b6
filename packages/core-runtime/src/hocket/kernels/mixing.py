"""Weighted sums of several vectors into several, in one walk through memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numba
import numpy as np

from hocket.kernels.compiling import LINE_BYTES, compiled, end_streaming, pointer_to, stream_line
from hocket.transport.peer import Array

__all__ = ["Mix"]

# Elements at a time: what is read, and the results until all are there, stay in a core's first cache.
_TILE = 256


class Mix:
    """Weighted sums of several vectors into several, with the bits of `reduction.weighted_sum`.

    Every product is rounded before it is added, and terms are added in order. All that can be prepared is: what
    calls it finds nothing in the caches, as training or the call before has just walked through memory.

    Args:
        values: addresses of flat, contiguous vectors, which the caller keeps alive.
        outs: addresses like `values`, where to write; all of them among `values`, or no vector overlaps one.
        terms: for each of `outs`, at least one (index in `values`, weight).
        numel: elements of each vector.
        dtype: float32 or float64.
    """

    __slots__ = ("_arguments", "_nonfinite")

    def __init__(
        self,
        values: Sequence[int],
        outs: Sequence[int],
        terms: Sequence[Sequence[tuple[int, float]]],
        numel: int,
        dtype: np.dtype[np.generic],
    ) -> None:
        sources = [source for own in terms for source, _ in own]
        weights = [weight for own in terms for _, weight in own]
        aligned = not any(out % LINE_BYTES for out in outs)
        self._nonfinite = np.zeros(len(values), dtype=np.bool_)
        self._arguments = (
            np.array(values, dtype=np.uint64),
            np.array(outs, dtype=np.uint64),
            np.array([0, *itertools.accumulate(map(len, terms))], dtype=np.int64),
            np.array(sources, dtype=np.int64),
            np.array(weights, dtype=dtype),
            numel,
            np.empty((len(outs), _TILE), dtype=dtype),
            aligned and set(values).isdisjoint(outs),
            np.zeros((len(values), _TILE), dtype=dtype),
            self._nonfinite,
        )

    def __call__(self) -> list[int]:
        """Write the sums, once.

        Returns:
            The indices in `values` of those that hold NaN or Inf and are the first term of some result.
        """
        _mix(*self._arguments)
        return [i for i, found in enumerate(self._nonfinite.tolist()) if found]


@compiled
def _mix(
    values: Array,
    outs: Array,
    starts: Array,
    sources: Array,
    weights: Array,
    numel: int,
    tile: Array,
    streams: bool,
    poison: Array,
    nonfinite: Array,
) -> None:
    for start in range(0, numel, _TILE):
        count = min(_TILE, numel - start)
        offset = np.uint64(start * tile.itemsize)
        for i in range(outs.size):
            total = tile[i, :count]
            first = starts[i]
            weight = weights[first]
            value = numba.carray(pointer_to(values[sources[first]] + offset, tile), count)
            found = poison[sources[first]]
            for k in range(count):
                total[k] = weight * value[k]
                # NaN for NaN and Inf, else 0: a test that needs no branch.
                found[k] += value[k] - value[k]
            for term in range(first + 1, starts[i + 1]):
                weight = weights[term]
                value = numba.carray(pointer_to(values[sources[term]] + offset, tile), count)
                for k in range(count):
                    total[k] += weight * value[k]
        # Only now: what is written may be what was read.
        for i in range(outs.size):
            if streams and count == _TILE:
                total_address = np.uint64(tile[i].ctypes.data)
                for k in range(0, _TILE * tile.itemsize, LINE_BYTES):
                    stream_line(outs[i] + offset + np.uint64(k), total_address + np.uint64(k))
            else:
                out = numba.carray(pointer_to(outs[i] + offset, tile), count)
                for k in range(count):
                    out[k] = tile[i, k]
    _note(poison, nonfinite)
    if streams:
        end_streaming()


@compiled
def _note(poison: Array, nonfinite: Array) -> None:
    """Note of which rows anything is NaN; all else is 0."""
    for i in range(nonfinite.size):
        for k in range(_TILE):
            nonfinite[i] |= poison[i, k] != 0
