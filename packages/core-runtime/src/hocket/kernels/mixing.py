"""Weighted sums of several vectors into several, in one walk through memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from hocket.kernels.compiling import compiled, fence, pointer_to
from hocket.kernels.lines import AHEAD_BYTES, LINE_BYTES, copy_line, scaled_line, weighted_line
from hocket.transport.peer import Array

__all__ = ["Mix", "Sums"]

# Bytes of a vector at a time: what is read stays in a core's first cache until it is written, and the next tile comes
# into it meanwhile.
_TILE_BYTES = AHEAD_BYTES


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
            np.empty((max(len(own.outs) for own in sums) + 1, _TILE_BYTES // dtype.itemsize), dtype=dtype),
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
    kept: Array,
    nonfinite: Array,
) -> None:
    value = out = 0
    for i in range(len(counts)):
        next_value, next_out = value + counts[i, 0], out + counts[i, 1]
        own_values, own_outs = values[value:next_value], outs[out:next_out]
        first, last = starts[out], starts[next_out]
        _mix(
            own_values,
            own_outs,
            starts[out : next_out + 1] - first,
            sources[first:last],
            weights[first:last],
            counts[i, 2],
            streams,
            kept,
            nonfinite[value:next_value],
        )
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
    streams: bool,
    kept: Array,
    nonfinite: Array,
) -> None:
    order, keeps, read_kept = _plan(values, outs, starts, sources)
    tile = kept.shape[1]
    found = np.zeros(outs.size, dtype=np.int64)
    for start in range(0, numel, tile):
        count = min(tile, numel - start)
        offset = np.uint64(start * kept.itemsize)
        for position in range(outs.size):
            i = order[position]
            to = outs[i] + offset
            if keeps[position] >= 0:
                _copy(_row(kept, keeps[position]), to, count, kept)
            first, last = starts[i], starts[i + 1] - 1
            row = read_kept[first]
            at = values[sources[first]] + offset if row < 0 else _row(kept, row)
            if first == last:
                found[i] |= _scale(to, at, weights[first], count, streams, kept)
                continue
            weight = weights[first]
            for term in range(first + 1, last + 1):
                row = read_kept[term]
                other_at = values[sources[term]] + offset if row < 0 else _row(kept, row)
                target = to if term == last else _row(kept, len(kept) - 1)
                bad = _add(target, at, weight, other_at, weights[term], count, streams and term == last, kept)
                if term == first + 1:
                    found[i] |= bad
                # A sum so far, times 1, keeps its bits.
                at, weight = target, weights.dtype.type(1)
    for i in range(outs.size):
        nonfinite[sources[starts[i]]] |= found[i] != 0


@compiled
def _row(kept: Array, row: int) -> int:
    """Return the address of a row."""
    return np.uint64(kept.ctypes.data + row * kept.shape[1] * kept.itemsize)


@compiled
def _copy(to: int, at: int, count: int, like: Array) -> None:
    lines = count * like.itemsize // LINE_BYTES
    for k in range(lines):
        copy_line(to, at, k)
    given, out = numba.carray(pointer_to(at, like), count), numba.carray(pointer_to(to, like), count)
    for k in range(lines * LINE_BYTES // like.itemsize, count):
        out[k] = given[k]


@compiled
def _scale(to: int, at: int, weight: float, count: int, streams: bool, like: Array) -> int:
    """Write weight * vector; return 0 where the vector is finite."""
    found = 0
    lines = count * like.itemsize // LINE_BYTES
    for k in range(lines):
        found |= scaled_line(to, at, weight, k, streams)
    given, out = numba.carray(pointer_to(at, like), count), numba.carray(pointer_to(to, like), count)
    for k in range(lines * LINE_BYTES // like.itemsize, count):
        found |= not np.isfinite(given[k])
        out[k] = weight * given[k]
    return found


@compiled
def _add(
    to: int, at: int, weight: float, other_at: int, other_weight: float, count: int, streams: bool, like: Array
) -> int:
    """Write weight * vector + other_weight * other; return 0 where the vector is finite."""
    found = 0
    lines = count * like.itemsize // LINE_BYTES
    for k in range(lines):
        found |= weighted_line(to, at, weight, other_at, other_weight, k, streams)
    given, out = numba.carray(pointer_to(at, like), count), numba.carray(pointer_to(to, like), count)
    other = numba.carray(pointer_to(other_at, like), count)
    for k in range(lines * LINE_BYTES // like.itemsize, count):
        found |= not np.isfinite(given[k])
        out[k] = weight * given[k] + other_weight * other[k]
    return found


@compiled
def _plan(values: Array, outs: Array, starts: Array, sources: Array) -> tuple[Array, Array, Array]:
    """Find an order of the results in which little is overwritten that others still need.

    In a cycle of ranks that hear from each other, it is one vector, whose tile is kept.

    Returns:
        The results in their order; for each the row in which to keep what it overwrites, or -1; and for each term the
        row in which it is kept by then, or -1.
    """
    num = outs.size
    order, keeps = np.empty(num, dtype=np.int64), np.full(num, -1)
    read_kept = np.empty(sources.size, dtype=np.int64)
    overwritten = np.full(num, -1)  # which of the values, if any
    for i in range(num):
        for value in range(values.size):
            if values[value] == outs[i]:
                overwritten[i] = value
    # How many terms of others still need a value, and in which row it is kept.
    needed, row_of = np.zeros(values.size, dtype=np.int64), np.full(values.size, -1)
    for i in range(num):
        for term in range(starts[i], starts[i + 1]):
            needed[sources[term]] += sources[term] != overwritten[i]
    todo = np.ones(num, dtype=np.bool_)
    rows = 0
    for position in range(num):
        chosen = -1
        for i in range(num):
            if todo[i] and (overwritten[i] < 0 or needed[overwritten[i]] == 0):
                chosen = i
                break
            if todo[i] and chosen < 0:
                chosen = i
        own = overwritten[chosen]
        for term in range(starts[chosen], starts[chosen + 1]):
            read_kept[term] = row_of[sources[term]]
            needed[sources[term]] -= sources[term] != own
        if own >= 0 and needed[own] > 0:
            row_of[own] = keeps[position] = rows
            rows += 1
        todo[chosen] = False
        order[position] = chosen
    return order, keeps, read_kept
