"""Counters in shared memory that show how far each rank of a lane is.

Stores become visible in order, as they do on x86-64: elsewhere no memory is shared (`memory.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from hocket.arrays import Array
from hocket.transport.host.sync import wait_while, wake

#: One rank's marks: a cache line, which nobody else writes.
MARK_BYTES = 64

#: So many exchanges of the lane this rank has made ready; in so many it has done its part.
READY, WORKED = 0, 1
# What the exchange is that was last made ready, as a checksum.
_CALL = 2
# The first exchange in whose data this rank found NaN or Inf, and whose data that was, a bit for each rank.
_NONFINITE, _WHOSE = 3, 4
# Ranks from here on share the last bit.
_LAST_BIT = 62


class Marks:
    """The marks of every rank; this rank writes its own and reads the others'.

    Args:
        rank: this rank among the lane's.
        marks: [MARK_BYTES] uint8 for each rank, zero at first.
    """

    def __init__(self, rank: int, marks: Sequence[Array]) -> None:
        # Memoryviews: waiting ranks look often, and an element of an array takes NumPy three times as long.
        self._marks = [mark.view(np.int64).data for mark in marks]
        self._own = self._marks[rank]
        self._addresses = [mark.ctypes.data for mark in marks]
        self._own_address = self._addresses[rank]

    def set(self, which: int, number: int) -> None:
        """Mark that this rank has reached exchange `number`, and wake ranks that wait for that."""
        self._own[which] = number
        wake(self._own_address + which * self._own.itemsize)

    def behind(self, which: int, number: int, ranks: Iterable[int]) -> int | None:
        """Return one of `ranks` that has not reached exchange `number`, None if all have."""
        for rank in ranks:
            if self._marks[rank][which] < number:
                return rank
        return None

    def sleep(self, which: int, number: int, rank: int, longest_s: float) -> None:
        """Sleep until `rank` reaches exchange `number`, or changes the mark otherwise, or for `longest_s` seconds."""
        said = self._marks[rank][which]
        if said < number:
            wait_while(self._addresses[rank] + which * self._own.itemsize, said, longest_s)

    def set_call(self, call: str) -> None:
        """Store, before `READY` is set, a word on this rank's exchange."""
        self._own[_CALL] = zlib.crc32(call.encode())

    def others_than(self, call: str, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks`, all ready, whose exchange is not `call`."""
        expected = zlib.crc32(call.encode())
        return [rank for rank in ranks if self._marks[rank][_CALL] != expected]

    def set_nonfinite(self, number: int, ranks: Iterable[int]) -> None:
        """Store, before `WORKED` is set, the ranks with NaN or Inf in exchange `number`; the first time counts."""
        whose = 0
        for rank in ranks:
            whose |= 1 << min(rank, _LAST_BIT)
        if whose and not self._own[_NONFINITE]:
            self._own[_WHOSE] = whose
            self._own[_NONFINITE] = number

    def nonfinite(self, number: int, by: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks whose data held NaN or Inf, up to exchange `number`, in the work of the ranks `by`."""
        whose = 0
        for mark in (self._marks[rank] for rank in by):
            if 0 < mark[_NONFINITE] <= number:
                whose |= mark[_WHOSE]
        return (
            tuple(rank for rank in range(len(self._marks)) if whose >> min(rank, _LAST_BIT) & 1)
            if whose
            else ()
        )
