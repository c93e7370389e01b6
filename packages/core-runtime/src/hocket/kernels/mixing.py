"""Weighted sums of several vectors into several, in one walk through memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from hocket.kernels.compiling import LINE_BYTES, compiled, fence, pointer_to, stream_line
from hocket.transport.peer import Array

__all__ = ["Mix", "Sums"]

# Elements at a time: what is read, and the results until all are there, stay in a core's first cache.
_TILE = 256


class Sums(NamedTuple):
    """Weighted sums of several vectors of one length.

    Attributes:
        values: addresses of flat, contiguous vectors, which the caller keeps alive.
        outs: addresses like `values`, where to write; all of them among `values`, or no vector overlaps one.
        terms: for each of `outs`, at least one (index in `values`, weight).
        numel: elements of each vector.
    """

    values: Sequence[int]
    outs: Sequence[int]
    terms: Sequence[Sequence[tuple[int, float]]]
    numel: int


class Mix:
    """Weighted sums of several vectors into several, with the bits of `reduction.weighted_sum`.

    Every product is rounded before it is added, and terms are added in order. All that can be prepared is: what
    calls it finds nothing in the caches, as training or the call before has just walked through memory.

    Args:
        sums: one after the other.
        dtype: of all vectors, float32 or float64.
    """

    __slots__ = ("_arguments", "_nonfinite")

    def __init__(self, sums: Sequence[Sums], dtype: np.dtype[np.generic]) -> None:
        values = [address for own in sums for address in own.values]
        outs = [address for own in sums for address in own.outs]
        all_terms = [terms for own in sums for terms in own.terms]
        pairs = [pair for terms in all_terms for pair in terms]
        aligned = not any(out % LINE_BYTES for out in outs)
        self._nonfinite = np.zeros(len(values), dtype=np.bool_)
        self._arguments = (
            np.array([(len(own.values), len(own.outs), own.numel) for own in sums], dtype=np.int64),
            np.array(values, dtype=np.uint64),
            np.array(outs, dtype=np.uint64),
            np.array([0, *itertools.accumulate(map(len, all_terms))], dtype=np.int64),
            np.array([source for source, _ in pairs], dtype=np.int64),
            np.array([weight for _, weight in pairs], dtype=dtype),
            aligned and set(values).isdisjoint(outs),
            np.empty((max(len(own.outs) for own in sums), _TILE), dtype=dtype),
            np.empty((max(len(own.values) for own in sums), _TILE), dtype=dtype),
            self._nonfinite,
        )

    def __call__(self) -> list[int]:
        """Write the sums, once.

        Returns:
            Those that hold NaN or Inf and are the first term of some result, by their place among all values.
        """
        _mix_all(*self._arguments)
        return [i for i, found in enumerate(self._nonfinite.tolist()) if found]


@compiled
def _mix_all(
    counts: Array,
    values: Array,
    outs: Array,
    starts: Array,
    sources: Array,
    weights: Array,
    streams: bool,
    tile: Array,
    poison: Array,
    nonfinite: Array,
) -> None:
    value = out = 0
    for i in range(len(counts)):
        next_value, next_out = value + counts[i, 0], out + counts[i, 1]
        own_values, own_outs = values[value:next_value], outs[out:next_out]
        own_starts = starts[out : next_out + 1]
        _mix(own_values, own_outs, own_starts, sources, weights, counts[i, 2], tile, streams, poison)
        _note(poison, nonfinite[value:next_value])
        value, out = next_value, next_out
    if streams:
        fence()


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
) -> None:
    poison[: values.size] = 0
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


@compiled
def _note(poison: Array, nonfinite: Array) -> None:
    """Note of which rows anything is NaN; all else is 0."""
    for i in range(nonfinite.size):
        for k in range(_TILE):
            nonfinite[i] |= poison[i, k] != 0
