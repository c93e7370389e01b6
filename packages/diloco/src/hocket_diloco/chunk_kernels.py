"""The loops over chunks that Numba compiles: the largest values of each, and their sums.

Keys are values' bits as integers: without the sign they are in the order of magnitudes, with Inf and NaN above all
others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from hocket.api import compiled
from hocket_diloco.kernels import PART, largest_key

if TYPE_CHECKING:
    from hocket.api import Array

_part_of = numba.njit(nogil=True)


@_part_of
def _count_from(keys: Array, mask: int, floor: int) -> int:
    count = 0
    for j in range(keys.size):
        count += (keys[j] & mask) >= floor
    return count


@_part_of
def _collect(keys: Array, mask: int, floor: int, places: Array, most: int) -> int:
    """Write down the places of keys that reach the floor, as far as there is room; return how many do."""
    count = 0
    for start in range(0, keys.size, PART):
        own = keys[start : start + PART]
        if own.size == PART and largest_key(own, mask) < floor:
            continue
        for j in range(own.size):
            if (own[j] & mask) >= floor:
                if count < most:
                    places[count] = start + j
                count += 1
    return count


@_part_of
def _floor_of(keys: Array, mask: int, count: int, most: int, guess: int, bound: Array) -> int:
    """Return a key that `count` to `most` keys reach; where there is none, the key of rank `count`.

    Args:
        bound: [1], memory of the keys' dtype, so that they are compared in it.
    """
    low, high = mask & 0, mask  # so many reach low, too few reach high
    floor = guess
    while high - low > 1:
        if not low < floor < high:
            floor = low + (high - low) // 2
        bound[0] = floor
        reaching = _count_from(keys, mask, bound[0])
        if reaching < count:
            high = floor
        elif reaching <= most:
            return floor
        else:
            low = floor
        # Magnitudes are a few powers of two away from a guess at most: their keys are a few exponents away.
        step = (mask >> 8) + 1 if keys.itemsize == 4 else (mask >> 11) + 1
        step = step >> 1
        floor = floor + step if reaching > most else floor - step
        if not low < floor < high:
            floor = low + (high - low) // 2
    return low


@compiled
def choose(
    values: Array,
    keys: Array,
    mask: int,
    starts: Array,
    lengths: Array,
    counts: Array,
    chosen: Array,
    packed: Array,
) -> None:
    """Choose of each chunk the elements of largest magnitude; of equal ones those that come first.

    Args:
        values: float32 or float64, flat.
        keys: the same memory as int32 or int64.
        mask: all bits but the sign's.
        starts, lengths, counts: int64 [chunks]: the place of each in `values`, its elements, 4096 at most, and the
            number chosen.
        chosen: [sum of counts], of the dtype of `values`, for the chosen values in the order of their places.
        packed: uint8 [ceil(1.5 sum of counts)], for their places in their chunks, of 12 bits each.
    """
    done = 0
    places = np.empty(4096, np.int64)
    found, bound = np.empty(4096, keys.dtype), np.empty(1, keys.dtype)
    floor = mask >> 1
    packed[:] = 0
    for chunk in range(starts.size):
        start, count = starts[chunk], counts[chunk]
        own = keys[start : start + lengths[chunk]]
        floor = _floor_of(own, mask, count, min(own.size, 2 * count), floor, bound)
        bound[0] = floor
        num_found = _collect(own, mask, bound[0], places, own.size)
        for j in range(num_found):
            found[j] = own[places[j]] & mask
        last = mask & 0
        if num_found > count:
            last = np.partition(found[:num_found], num_found - count)[num_found - count]
        room = count  # for those that equal the last
        for j in range(num_found):
            room -= found[j] > last
        for j in range(num_found):
            if found[j] < last or (found[j] == last and room == 0):
                continue
            room -= found[j] == last
            place = places[j]
            chosen[done] = values[start + place]
            byte = done // 2 * 3
            if done % 2 == 0:
                packed[byte] = place & 255
                packed[byte + 1] = place >> 8
            else:
                packed[byte + 1] |= (place & 15) << 4
                packed[byte + 2] = place >> 4
            done += 1


@compiled
def add_chunks(
    chosen: Array,
    packed: Array,
    weight: float,
    starts: Array,
    lengths: Array,
    counts: Array,
    out: Array,
    clear: bool,
) -> bool:
    """Add weight times what was chosen to `out`, flat, or clear it there; return whether all lay in their chunks.

    The other arguments are those of `choose`; where elements are cleared, `chosen` is not looked at.
    """
    done = 0
    for chunk in range(starts.size):
        for _ in range(counts[chunk]):
            byte = done // 2 * 3
            if done % 2 == 0:
                place = np.int64(packed[byte]) | np.int64(packed[byte + 1] & 15) << 8
            else:
                place = np.int64(packed[byte + 1]) >> 4 | np.int64(packed[byte + 2]) << 4
            if place >= lengths[chunk]:
                return False
            if clear:
                out[starts[chunk] + place] = 0
            else:
                out[starts[chunk] + place] += weight * chosen[done]
            done += 1
    return True
