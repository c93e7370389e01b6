"""Weighted sums of several vectors into several, in one walk through memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numba
import numpy as np

from hocket.kernels.compiling import LINE_BYTES, compiled, end_streaming, pointer_to, stream_line
from hocket.transport.peer import Array

__all__ = ["mix"]

# Elements at a time: what is read, and the results until all are there, stay in a core's first cache.
_TILE = 256


def mix(
    values: Sequence[Array], outs: Sequence[Array], terms: Sequence[Sequence[tuple[int, float]]]
) -> list[int]:
    """Write into each of `outs` its weighted sum of `values`, with the bits of `reduction.weighted_sum`.

    Every product is rounded before it is added, and terms are added in order.

    Args:
        values: float32 or float64, [n] each, flat and contiguous.
        outs: like `values`; all of them the memory of some of `values`, or none overlaps one.
        terms: for each of `outs`, at least one (index in `values`, weight).

    Returns:
        The indices in `values` of those that hold NaN or Inf and are the first term of some result.
    """
    numel, dtype = values[0].size, values[0].dtype
    flat = [term for own in terms for term in own]
    sources, targets = _addresses(values), _addresses(outs)
    poison = np.zeros((len(values), _TILE), dtype=dtype)
    aligned = not any(target % LINE_BYTES for target in targets)
    _mix(
        np.array(sources, dtype=np.uint64),
        np.array(targets, dtype=np.uint64),
        np.array([0, *itertools.accumulate(map(len, terms))], dtype=np.int64),
        np.array([source for source, _ in flat], dtype=np.int64),
        np.array([weight for _, weight in flat], dtype=dtype),
        numel,
        np.empty((len(outs), _TILE), dtype=dtype),
        aligned and set(sources).isdisjoint(targets),
        poison,
    )
    return np.flatnonzero(poison.any(axis=1)).tolist()


def _addresses(arrays: Sequence[Array]) -> list[int]:
    return [array.__array_interface__["data"][0] for array in arrays]


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
    if streams:
        end_streaming()
