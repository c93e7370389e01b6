"""The loops over memory that Numba compiles.

The pass walks through memory in tiles that stay in a core's first cache: it updates a tile, looks for the largest key
of each 64 elements with vector instructions, and goes through those elements one by one only where one passes. At a
density of 0.1 % that is one in sixteen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from hocket.api import compiled
from hocket_redsync.kernels.api import MOMENTUM, PICK, PLAIN

if TYPE_CHECKING:
    from hocket.api import Array

_TILE = 1024
_PART = 64

# The number of elements after which the search for NaN and Inf may stop early.
_BLOCK = 1 << 16

# Calls for each tile would cost a tenth of the pass.
_inlined = numba.njit(nogil=True, inline="always")


@_inlined
def _decay(given: Array, parameter: Array, decay: float, out: Array) -> None:
    for j in range(given.size):
        out[j] = given[j] + decay * parameter[j]


@_inlined
def _accumulate(mode: int, given: Array, velocity: Array, residual: Array, momentum: float) -> None:
    if mode == PLAIN:
        for j in range(given.size):
            residual[j] += given[j]
    elif mode == MOMENTUM:
        for j in range(given.size):
            velocity[j] = momentum * velocity[j] + given[j]
            residual[j] += velocity[j]
    else:
        for j in range(given.size):
            velocity[j] = momentum * velocity[j] + given[j]
            residual[j] += given[j] + momentum * velocity[j]


@_inlined
def _pick(
    keys: Array,
    residual: Array,
    flip: int,
    mask: int,
    floor: int,
    first: int,
    indices: Array,
    values: Array,
    count: int,
) -> int:
    """Append the elements that pass to the `count` found so far, while there is room; return the new count."""
    for start in range(0, keys.size, _PART):
        own = keys[start : start + _PART]
        if own.size == _PART:  # a loop of known length becomes a few vector instructions
            top = mask & 0
            for j in range(_PART):
                top = max(top, (own[j] ^ flip) & mask)
            if top < floor:
                continue
        for j in range(own.size):
            if (own[j] ^ flip) & mask >= floor:
                if count < indices.size:
                    indices[count] = first + start + j
                    values[count] = residual[start + j]
                count += 1
    return count


@compiled
def advance(
    mode: int,
    given: Array,
    velocity: Array,
    residual: Array,
    keys: Array,
    parameter: Array,
    momentum: float,
    decay: float,
    flip: int,
    mask: int,
    floor: int,
    first: int,
    indices: Array,
    values: Array,
) -> int:
    """Carry out `Kernels.advance` in one piece; return the number that passed, those without room included."""
    count = 0
    tile = np.empty(_TILE, residual.dtype)
    for start in range(0, residual.size, _TILE):
        stop = min(start + _TILE, residual.size)
        if mode != PICK:
            g = given[start:stop]
            if parameter.size > 0:
                _decay(g, parameter[start:stop], decay, tile)
                g = tile[: stop - start]
            _accumulate(mode, g, velocity[start:stop], residual[start:stop], momentum)
        count = _pick(
            keys[start:stop], residual[start:stop], flip, mask, floor, first + start, indices, values, count
        )
    return count


@compiled
def is_below(keys: Array, mask: int, infinity: int) -> bool:
    """Return whether the key of every element is below that of Inf."""
    for start in range(0, keys.size, _BLOCK):
        block = keys[start : start + _BLOCK]
        top = mask & 0
        for j in range(block.size):
            top = max(top, block[j] & mask)
        if top >= infinity:
            return False
    return True


@compiled
def clear(flat: Array, indices: Array) -> None:
    """Set elements to 0."""
    for index in indices:
        flat[index] = 0


@compiled
def add_message(
    out: Array,
    weight: float,
    dense_starts: Array,
    dense_counts: Array,
    mean_counts: Array,
    values: Array,
    means: Array,
    dense: Array,
    indices: Array,
    mean_indices: Array,
) -> bool:
    """Add a message as `hocket_redsync.kernels.cpu.add_message`; return False, and add nothing, for a bad index."""
    numel = out.size
    for index in indices:
        if not 0 <= index < numel:
            return False
    for index in mean_indices:
        if not 0 <= index < numel:
            return False
    for i in range(indices.size):
        out[indices[i]] += weight * values[i]
    first = 0
    for i in range(mean_counts.size):
        value = weight * means[i]
        for index in mean_indices[first : first + mean_counts[i]]:
            out[index] += value
        first += mean_counts[i]
    first = 0
    for i in range(dense_counts.size):
        part = out[dense_starts[i] : dense_starts[i] + dense_counts[i]]
        given = dense[first : first + dense_counts[i]]
        for j in range(part.size):
            part[j] += weight * given[j]
        first += dense_counts[i]
    return True
