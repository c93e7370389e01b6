"""Weighted sums of several ranks' vectors, in one walk through memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from hocket.arrays import Array, MixingRows
from hocket.kernels.compiling import compiled, compiled_once, fence, pointer_to
from hocket.kernels.lines import AHEAD_BYTES, LINE_BYTES, copy_line, scaled_line, weighted_line

# Bytes of a vector at a time: what is read stays in a core's first cache until it is written, and the next tile comes
# into it meanwhile.
_TILE_BYTES = AHEAD_BYTES

#: The terms of all places as one.
JoinedRows = MixingRows


class Mix:
    """The share of one rank in all ranks' weighted sums, with the bits of `reduction.weighted_sum`.

    Ranks that are connected by their sums share the work: each writes all of their results, for its share of the
    elements. The caches are cold when it is called, as training has just walked through memory: so Python does the same
    little work for one place and for many.

    Args:
        rank: this rank's number in `values`.
        values: for each place every rank's vector, by its address; flat, contiguous, and kept alive by the caller.
        outs: like `values`, the places of every rank's sum; a place's are all those of `values`, or overlap none.
        numels: elements of each place's vectors.
        dtype: of all vectors, float32 or float64.
    """

    def __init__(
        self,
        rank: int,
        values: Sequence[Sequence[int]],
        outs: Sequence[Sequence[int]],
        numels: Sequence[int],
        dtype: np.dtype[np.generic],
    ) -> None:
        self._rank = rank
        self._dtype = dtype
        self._values = np.array(values, dtype=np.uint64)
        self._outs = np.array(outs, dtype=np.uint64)
        self._numels = np.array(numels, dtype=np.int64)
        size = self._values.shape[1]
        self._in_place = (self._values == self._outs).all(axis=1)
        self._streams = ~self._in_place & (self._outs % np.uint64(LINE_BYTES) == 0).all(axis=1)
        self._kept = np.empty((size + 1, _TILE_BYTES // dtype.itemsize), dtype=dtype)
        # Compile all, or load it, where no other rank waits for a first sum yet.
        alone = self.join([MixingRows(np.arange(size + 1), np.arange(size), np.ones(size))] * len(numels))
        with compiled_once(_mix_all):
            self.connected(alone)
            self._write(alone, np.zeros_like(self._numels))

    def join(self, terms: Sequence[MixingRows]) -> JoinedRows:
        """Return the terms of all places, in their order, as one: starts [places, ranks + 1], each from 0."""
        starts, sources, weights = zip(*terms, strict=True)
        return MixingRows(
            np.concatenate(starts).reshape(self._values.shape[0], -1),
            np.concatenate(sources),
            np.concatenate(weights).astype(self._dtype),
        )

    def connected(self, terms: JoinedRows) -> list[int]:
        """Return the ranks that share the work at some place with this one, itself included, in ascending order."""
        found: list[int] = np.flatnonzero(_connected(self._rank, terms.starts, terms.sources)).tolist()
        return found

    def __call__(self, terms: JoinedRows) -> list[int]:
        """Write this rank's share of the sums.

        Returns:
            The ranks whose values hold NaN or Inf in this share and are the first term of some result, in ascending
            order.
        """
        return self._write(terms, self._numels)

    def _write(self, terms: JoinedRows, numels: Array) -> list[int]:
        nonfinite = np.zeros(self._values.shape[1], dtype=np.bool_)
        _mix_all(
            self._rank,
            self._values,
            self._outs,
            numels,
            *terms,
            self._in_place,
            self._streams,
            self._kept,
            nonfinite,
        )
        found: list[int] = np.flatnonzero(nonfinite).tolist()
        return found


@compiled
def _connected(rank: int, starts: Array, sources: Array) -> Array:
    connected = np.zeros(starts.shape[1] - 1, dtype=np.bool_)
    first = 0
    for place in range(starts.shape[0]):
        for member in _component(rank, starts[place], sources[first:]):
            connected[member] = True
        first += starts[place, -1]
    return connected


@compiled
def _component(rank: int, starts: Array, sources: Array) -> Array:
    """Return the ranks that are connected with one, in ascending order, by joining trees."""
    size = starts.size - 1
    parents = np.arange(size)
    for i in range(size):
        for term in range(starts[i], starts[i + 1]):
            parents[_root(parents, i)] = _root(parents, sources[term])
    own = _root(parents, rank)
    members = np.empty(size, dtype=np.int64)
    num = 0
    for i in range(size):
        if _root(parents, i) == own:
            members[num] = i
            num += 1
    return members[:num]


@compiled
def _root(parents: Array, i: int) -> int:
    while parents[i] != i:
        parents[i] = parents[parents[i]]
        i = parents[i]
    return i


@compiled
def _mix_all(
    rank: int,
    values: Array,
    outs: Array,
    numels: Array,
    starts: Array,
    sources: Array,
    weights: Array,
    in_place: Array,
    streams: Array,
    kept: Array,
    nonfinite: Array,
) -> None:
    first = 0
    for place in range(starts.shape[0]):
        last = first + starts[place, -1]
        own_starts, own_sources = starts[place], sources[first:last]
        members = _component(rank, own_starts, own_sources)
        position = np.searchsorted(members, rank)
        # Whole cache lines each.
        lines = -(-numels[place] * kept.itemsize // (members.size * LINE_BYTES))
        share = lines * LINE_BYTES // kept.itemsize
        start = min(position * share, numels[place])
        offset = np.uint64(start * kept.itemsize)
        _mix(
            values[place] + offset,
            outs[place] + offset,
            min(share, numels[place] - start),
            members,
            own_starts,
            own_sources,
            weights[first:last],
            in_place[place],
            streams[place],
            kept,
            nonfinite,
        )
        first = last
    if streams.any():
        fence()


@compiled
def _mix(
    values: Array,
    outs: Array,
    numel: int,
    members: Array,
    starts: Array,
    sources: Array,
    weights: Array,
    in_place: bool,
    streams: bool,
    kept: Array,
    nonfinite: Array,
) -> None:
    order, keeps, read_kept = _plan(members, starts, sources, in_place)
    tile = kept.shape[1]
    sum_so_far = _row(kept, len(kept) - 1)
    found = np.zeros(members.size, dtype=np.int64)
    for start in range(0, numel, tile):
        count = min(tile, numel - start)
        offset = np.uint64(start * kept.itemsize)
        for position in range(members.size):
            i = order[position]
            to = outs[i] + offset
            if keeps[position] >= 0:
                _copy(_row(kept, keeps[position]), to, count, kept)
            first, last = starts[i], starts[i + 1] - 1
            at, weight = _kept_or(values[sources[first]] + offset, kept, read_kept[first]), weights[first]
            if first == last:
                found[position] |= _scale(to, at, weight, count, streams, kept)
                continue
            for term in range(first + 1, last + 1):
                other_at = _kept_or(values[sources[term]] + offset, kept, read_kept[term])
                target = to if term == last else sum_so_far
                bad = _add(target, at, weight, other_at, weights[term], count, streams and term == last, kept)
                if term == first + 1:
                    found[position] |= bad
                # A sum so far, times 1, keeps its bits.
                at, weight = target, weights.dtype.type(1)
    for position in range(members.size):
        nonfinite[sources[starts[order[position]]]] |= found[position] != 0


@compiled
def _row(kept: Array, row: int) -> Any:
    """Return the address of a row."""
    return np.uint64(kept.ctypes.data) + np.uint64(row * kept.shape[1] * kept.itemsize)


@compiled
def _kept_or(at: Any, kept: Array, row: int) -> Any:
    """Return the address of a row; `at` if there is none, as its number is negative."""
    return at if row < 0 else _row(kept, row)


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
    to: int,
    at: int,
    weight: float,
    other_at: int,
    other_weight: float,
    count: int,
    streams: bool,
    like: Array,
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
def _plan(members: Array, starts: Array, sources: Array, in_place: bool) -> tuple[Array, Array, Array]:
    """Find an order of the members' results that overwrites few values that others still need.

    In a cycle of ranks that receive from each other, it is one vector, whose tile is kept.

    Returns:
        The members in their order; for each the row to keep its overwritten values in, or -1; and for each
        term the row in which it is kept by then, or -1.
    """
    order, keeps = members.copy(), np.full(members.size, -1)
    read_kept = np.full(sources.size, -1)
    if not in_place:
        return order, keeps, read_kept
    # How many terms of others still need a value, and in which row it is kept.
    size = starts.size - 1
    needed, row_of = np.zeros(size, dtype=np.int64), np.full(size, -1)
    for i in members:
        for term in range(starts[i], starts[i + 1]):
            needed[sources[term]] += sources[term] != i
    rows = 0
    for position in range(members.size):
        # The rest of `order` is what is left to do.
        chosen = position
        for candidate in range(position, members.size):
            if needed[order[candidate]] == 0:
                chosen = candidate
                break
        i = order[chosen]
        order[chosen] = order[position]
        order[position] = i
        for term in range(starts[i], starts[i + 1]):
            read_kept[term] = row_of[sources[term]]
            needed[sources[term]] -= sources[term] != i
        if needed[i] > 0:
            row_of[i] = keeps[position] = rows
            rows += 1
    return order, keeps, read_kept
