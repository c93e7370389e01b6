"""The merge of a delayed exchange, and the copy that the next exchange sends, in one pass over memory."""

from __future__ import annotations

import numpy as np

from hocket.arrays import Array
from hocket.kernels.compiling import compiled

__all__ = ["merge_delayed"]

_TILE = 1024


def merge_delayed(values: Array, combined: Array, factor: float, sent: Array, *, sends: bool) -> bool:
    """Add `factor * combined - sent` to `values`, rounded after each operation, and return whether all is finite.

    Args:
        values: float32 or float64 [n], flat and contiguous.
        combined: like `values`: what came back.
        factor: rounded to the dtype of `values` first, as torch and NumPy do.
        sent: like `values`: what was sent.
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
