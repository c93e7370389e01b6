"""A scaled copy that looks for NaN and Inf on its way."""

from __future__ import annotations

import numpy as np

from hocket.arrays import Array
from hocket.kernels.compiling import compiled, fence
from hocket.kernels.lines import LINE_BYTES, stream_line

__all__ = ["scaled_copy"]

# Elements at a time: they stay in a core's first cache until they are written.
_TILE = 1024


def scaled_copy(given: Array, factor: float, out: Array) -> bool:
    """Write `factor * given` into `out`, and return whether all of it is finite.

    Meant for what will not be read again soon: large results are written around the caches.

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
