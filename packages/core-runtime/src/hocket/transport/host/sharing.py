"""What one rank does of an exchange that all ranks work on: its share of everybody's elements."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.arrays import Array
from hocket.transport.reduction import TreeSum

__all__ = ["share_of", "sum_share"]

_CACHE_LINE_BYTES = 64


def share_of(array: Array, position: int, size: int) -> slice:
    """Return the elements of `array` that are number `position`'s of `size` to work on: whole cache lines."""
    lines = -(-array.nbytes // (size * _CACHE_LINE_BYTES))
    numel = lines * _CACHE_LINE_BYTES // array.itemsize
    return slice(min(position * numel, array.size), min((position + 1) * numel, array.size))


def sum_share(rank: int, total: TreeSum, sends: Sequence[Array], receives: Sequence[Array]) -> list[int]:
    """Write the sum of all `sends` into all `receives`, for the elements of this rank's share.

    Args:
        rank: this rank.
        total: for so many arrays of this dtype.
        sends: every rank's, by rank, [n].
        receives: every rank's, by rank, [n]; each its `send`, or other memory.
    """
    own = share_of(sends[0], rank, len(sends))
    total([send[own] for send in sends], *(receive[own] for receive in receives))
    return []
