"""The loops over values that Numba compiles: codes of quantised groups.

Each walks through memory once, in tiles that stay in a core's first cache; where a group's table must be known before
its first code is, groups beyond the cache are read twice. Keys are values' bits as integers: without the sign they
are in the order of magnitudes, with Inf and NaN above all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from hocket.api import compiled

if TYPE_CHECKING:
    from hocket.api import Array

#: Kinds of codes: multiples of a step, signs with an exponent, signs, or bins with their members' means.
INT, E3M0, SIGN, STATISTICAL = 0, 1, 2, 3

_TILE = 1024
#: Values that are looked at together, to leave them out at once.
PART = 64

#: Sums of each bin that are added up side by side: neighbours often lie in one bin, and would wait for each other.
_LANES = 4

_part_of = numba.njit(nogil=True)
# Sums in any order: their last bits are those of the machine's vectors.
_summing = numba.njit(nogil=True, fastmath={"reassoc"})


@_part_of
def largest_key(keys: Array, mask: int) -> int:
    top = mask & 0
    for j in range(keys.size):
        top = max(top, keys[j] & mask)
    return top


@_summing
def _sum(values: Array) -> float:
    total = 0.0
    for j in range(values.size):
        total += values[j]
    return total


@_summing
def _sum_of_sizes(values: Array) -> float:
    total = 0.0
    for j in range(values.size):
        total += abs(values[j])
    return total


@_summing
def _sum_of_squares(values: Array, mean: float) -> float:
    total = 0.0
    for j in range(values.size):
        total += (values[j] - mean) * (values[j] - mean)
    return total


@_part_of
def _code_ints(values: Array, inverse: float, top: int, codes: Array) -> None:
    for j in range(values.size):
        codes[j] = np.int32(np.rint(values[j] * inverse)) + top


@_part_of
def _code_signs(keys: Array, codes: Array) -> None:
    for j in range(keys.size):
        codes[j] = keys[j] < 0


@_part_of
def _code_exponents(
    values: Array, keys: Array, inverse: float, least: float, tile: Array, bits: Array, codes: Array
) -> None:
    """Round to the nearest of 0 and 2**-6 to 1, in multiples of the largest.

    Args:
        inverse: 4/3 divided by the largest, so that what is rounded up reaches the next power.
        least: the smallest magnitude that is rounded up from 0.
        tile, bits: memory for as many values, and the same memory as keys.
    """
    shift, bias = (23, 127) if values.itemsize == 4 else (52, 1023)
    for j in range(values.size):
        tile[j] = abs(values[j]) * inverse
    for j in range(values.size):
        exponent = (bits[j] >> shift) - bias
        code = min(7, max(7 + exponent, 1 if tile[j] >= least else 0))
        codes[j] = code | (8 if keys[j] < 0 else 0)


@_part_of
def _code_bins(values: Array, mean: float, inverse: float, num_levels: int, codes: Array) -> None:
    # All in 32 bits, of which a vector holds twice as many as of 64.
    lowest, middle, top = np.int32(0), np.int32(num_levels // 2), np.int32(num_levels - 1)
    for j in range(values.size):
        code = np.int32(np.int32(np.rint((values[j] - mean) * inverse)) + middle)
        codes[j] = min(top, max(lowest, code))


@_part_of
def _add_to_bins(values: Array, codes: Array, sums: Array) -> None:
    """Add values and their numbers to `sums`, flat [bins, lanes, 2], which is indexed by constants."""
    full = values.size - values.size % _LANES
    for first in range(0, full, _LANES):
        for lane in range(_LANES):
            place = codes[first + lane] * (2 * _LANES) + 2 * lane
            sums[place] += values[first + lane]
            sums[place + 1] += 1.0
    for j in range(full, values.size):
        sums[codes[j] * (2 * _LANES)] += values[j]
        sums[codes[j] * (2 * _LANES) + 1] += 1.0


@_part_of
def _pack(codes: Array, bits: int, packed: Array) -> None:
    """Write codes one after the other, the first in the lowest bits of a byte."""
    each = 8 // bits
    full = codes.size // each
    if bits == 8:
        for j in range(codes.size):
            packed[j] = codes[j]
    elif bits == 4:
        for j in range(full):
            packed[j] = codes[2 * j] | codes[2 * j + 1] << 4
    elif bits == 2:
        for j in range(full):
            packed[j] = codes[4 * j] | codes[4 * j + 1] << 2 | codes[4 * j + 2] << 4 | codes[4 * j + 3] << 6
    else:
        for j in range(full):
            byte = 0
            for i in range(8):
                byte |= codes[8 * j + i] << i
            packed[j] = byte
    if full * each < codes.size:
        byte = 0
        for i in range(codes.size - full * each):
            byte |= codes[full * each + i] << bits * i
        packed[full] = byte


@_part_of
def _code_statistically(values: Array, bits: int, table: Array, codes: Array, packed: Array) -> None:
    """Code a group by bins of 6 standard deviations / their number around the mean, and note their members' means."""
    num_levels = 1 << bits
    mean = _sum(values) / values.size
    spread = np.sqrt(_sum_of_squares(values, mean) / values.size)
    width = 6 * spread / num_levels
    inverse = 1 / width if width > 0 else 0.0
    if not np.isfinite(inverse):
        inverse = 0.0
    sums = np.zeros(num_levels * _LANES * 2)
    each = 8 // bits
    for start in range(0, values.size, _TILE):
        part = values[start : start + _TILE]
        part_codes = codes[: part.size]
        _code_bins(part, mean, inverse, num_levels, part_codes)
        _add_to_bins(part, part_codes, sums)
        _pack(part_codes, bits, packed[start // each :])
    for number in range(num_levels):
        total, count = 0.0, 0.0
        for place in range(2 * _LANES * number, 2 * _LANES * (number + 1), 2):
            total += sums[place]
            count += sums[place + 1]
        table[number] = total / count if count else 0.0
        if not np.isfinite(spread):
            table[number] = np.nan


@compiled
def encode(
    kind: int,
    bits: int,
    values: Array,
    keys: Array,
    mask: int,
    infinity: int,
    starts: Array,
    lengths: Array,
    tables: Array,
    packed: Array,
) -> None:
    """Write each group's table and codes; the codes of each begin at a byte.

    Args:
        kind: one of `INT`, `E3M0`, `SIGN` and `STATISTICAL`.
        bits: the width of a code, 1, 2, 4 or 8.
        values: float32 or float64, flat.
        keys: the same memory as int32 or int64.
        mask: all bits but the sign's.
        infinity: the key of Inf.
        starts, lengths: int64 [groups], of each group in `values`.
        tables: [groups, numbers], of the dtype of `values`: a step, the largest magnitude, the mean magnitude, or the
            mean of each bin; NaN where the group holds NaN or Inf.
        packed: uint8, for the codes.
    """
    codes = np.empty(_TILE, np.uint8)
    tile = np.empty(_TILE, values.dtype)
    tile_bits = tile.view(keys.dtype)
    factors = np.empty(2, values.dtype)  # so that products have that dtype, too
    factors[1] = 2.0**-7 * 4 / 3
    each, place = 8 // bits, 0
    top = (1 << (bits - 1)) - 1
    for group in range(starts.size):
        start, stop = starts[group], starts[group] + lengths[group]
        own, own_keys = values[start:stop], keys[start:stop]
        num_bytes = -(-own.size // each)
        out = packed[place : place + num_bytes]
        place += num_bytes
        if kind == STATISTICAL:
            _code_statistically(own, bits, tables[group], codes, out)
            continue
        largest = largest_key(own_keys, mask)
        scale = tables[group, :1]
        if kind == SIGN:
            scale[0] = _sum_of_sizes(own) / own.size
        else:
            scale.view(keys.dtype)[0] = largest
            if kind == INT:
                scale[0] = scale[0] / top
        inverse = 1 / scale[0] if scale[0] > 0 else scale[0]
        if not np.isfinite(inverse):
            inverse = scale[0] * 0
            scale[0] = inverse
        factors[0] = inverse * 4 / 3 if kind == E3M0 else inverse
        if largest >= infinity:
            scale[0] = np.nan
        for first in range(0, own.size, _TILE):
            part, part_keys = own[first : first + _TILE], own_keys[first : first + _TILE]
            part_codes = codes[: part.size]
            if kind == INT:
                _code_ints(part, factors[0], top, part_codes)
            elif kind == SIGN:
                _code_signs(part_keys, part_codes)
            else:
                _code_exponents(part, part_keys, factors[0], factors[1], tile, tile_bits, part_codes)
            _pack(part_codes, bits, out[first // each :])


@_part_of
def _set_levels(kind: int, bits: int, table: Array, levels: Array) -> None:
    """Write the value of each code."""
    if kind == INT:
        top = (1 << (bits - 1)) - 1
        for code in range(1 << bits):
            levels[code] = table[0] * (code - top)
    elif kind == E3M0:
        for code in range(8):
            level = table[0] * 2.0 ** (code - 7) if code else table[0] * 0
            levels[code], levels[8 + code] = level, -level
    elif kind == SIGN:
        levels[0], levels[1] = table[0], -table[0]
    else:
        levels[: 1 << bits] = table


@compiled
def decode(
    kind: int,
    bits: int,
    tables: Array,
    packed: Array,
    weight: float,
    starts: Array,
    lengths: Array,
    out: Array,
) -> None:
    """Add weight times what codes stand for to `out`, flat; the other arguments are those of `encode`."""
    levels = np.empty(256, out.dtype)
    each, place = 8 // bits, 0
    for group in range(starts.size):
        own = out[starts[group] : starts[group] + lengths[group]]
        num_bytes = -(-own.size // each)
        codes = packed[place : place + num_bytes]
        place += num_bytes
        _set_levels(kind, bits, tables[group], levels)
        for code in range(1 << bits):
            levels[code] *= weight
        full = own.size // each
        if bits == 8:
            for j in range(own.size):
                own[j] += levels[codes[j]]
        elif bits == 4:
            for j in range(full):
                own[2 * j] += levels[codes[j] & 15]
                own[2 * j + 1] += levels[codes[j] >> 4]
        else:
            mask = (1 << bits) - 1
            for j in range(full):
                byte = codes[j]
                for i in range(each):
                    own[each * j + i] += levels[byte >> bits * i & mask]
        for i in range(full * each, own.size):
            own[i] += levels[codes[full] >> bits * (i - full * each) & ((1 << bits) - 1)]
