"""Single passes over one vector that write another, and look for NaN and Inf on their way."""

from __future__ import annotations

import numpy as np

from hocket.arrays import Array
from hocket.kernels.compiling import compiled, fence
from hocket.kernels.lines import LINE_BYTES, stream_line

# Elements at a time: they stay in a core's first cache until they are written.
_TILE = 1024


def scaled_copy(given: Array, factor: float, out: Array) -> bool:
    """Write `factor * given` into `out`, and return whether all of it is finite.

    It is meant for results that are not read again soon: large ones are written around the caches.

    Args:
        given: float32 or float64 [n], flat and contiguous.
        factor: rounded to the dtype of `given` first, as torch and NumPy do.
        out: like `given`, not overlapping it.
    """
    dtype = given.dtype
    tile, poison = np.zeros((2, _TILE), dtype=dtype)
    _scaled_copy(given, dtype.type(factor), out, tile, poison, out.ctypes.data % LINE_BYTES == 0)
    return not poison.any()


@compiled
def _scaled_copy(given: Array, factor: float, out: Array, tile: Array, poison: Array, streams: bool) -> None:
    for start in range(0, given.size, _TILE):
        count = min(_TILE, given.size - start)
        part = given[start : start + count]
        for k in range(count):
            value = factor * part[k]
            tile[k] = value
            poison[k] += value - value  # NaN for NaN and Inf, else 0: a test that needs no branch
        if streams and count == _TILE:
            to, source = np.uint64(out.ctypes.data + start * tile.itemsize), np.uint64(tile.ctypes.data)
            for k in range(0, _TILE * tile.itemsize, LINE_BYTES):
                stream_line(to + np.uint64(k), source + np.uint64(k))
        else:
            rest = out[start : start + count]
            for k in range(count):
                rest[k] = tile[k]
    if streams:
        fence()


def merge_delayed(values: Array, combined: Array, factor: float, sent: Array, *, sends: bool) -> bool:
    """Add `factor * combined - sent` to `values`, rounded after each operation, and return whether all is finite.

    Merges a delayed exchange.

    Args:
        values: float32 or float64 [n], flat and contiguous.
        combined: like `values`: the exchange's result.
        factor: rounded to the dtype of `values` first, as torch and NumPy do.
        sent: like `values`: the sent values.
        sends: whether `sent` becomes a copy of the new values, to be sent next.
    """
    dtype = values.dtype
    poison = np.zeros(_TILE, dtype=dtype)
    _merge(values, combined, dtype.type(factor), sent, poison, sends)
    return not poison.any()


@compiled
def _merge(values: Array, combined: Array, factor: float, sent: Array, poison: Array, sends: bool) -> None:
    for start in range(0, values.size, _TILE):
        count = min(_TILE, values.size - start)
        to, change, before = (
            values[start : start + count],
            combined[start : start + count],
            sent[start : start + count],
        )
        for k in range(count):
            value = to[k] + (factor * change[k] - before[k])
            to[k] = value
            poison[k] += value - value  # NaN for NaN and Inf, else 0
        if sends:  # while the tile is in the cache
            for k in range(count):
                before[k] = to[k]
