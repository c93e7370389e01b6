"""Pipes in shared memory between two ranks of a host: streams of bytes that take no call of the system.

Each rank has an inbox of each other one: a ring of bytes, with the number of bytes that the sender has ever written
there, and of those that the receiver has read. Stores become visible in order, as they do on x86-64: elsewhere no
memory is shared (`transport/host/memory.py`). A rank that sleeps shows that, and is woken by a message on the socket
between the two, which also shows the other one's death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hocket.arrays import Array

_LINE_BYTES = 64
# Of an inbox: bytes written, which the sender stores, bytes read, which the receiver does, and whether the sender waits
# for room; int64, each in a cache line of its own.
_WRITTEN, _READ, _WAITS = 0, 8, 16
_MARKS_BYTES = 3 * _LINE_BYTES
# A message of a few hundred KB is sent before its receiver looks, as by TCP; all inboxes of a rank take few MB.
_MOST_BYTES = 2 << 20
_MOST_TOGETHER_BYTES = 4 << 20
_LEAST_BYTES = 1 << 14
# After so many bytes the receiver can begin to read.
_TURN_BYTES = 1 << 17


class Naps:
    """The count of a rank's naps, odd while one of its threads sleeps; only that rank writes it.

    Args:
        memory: a cache line, uint8.
    """

    def __init__(self, memory: Array) -> None:
        self._count = memory[:8].view(np.int64).data
        self._heard = 0

    def begin(self) -> None:
        """Show that a thread of this rank is about to sleep."""
        self._count[0] += 1 + (self._count[0] & 1)

    def end(self, *, others: bool) -> None:
        """Show that a thread is awake; `others` says whether further ones still sleep."""
        self._count[0] += 1 + others

    def is_new(self) -> bool:
        """Return, of another rank, whether it sleeps, and has not been woken from that nap before."""
        count: int = self._count[0]
        if not count & 1 or count == self._heard:
            return False
        self._heard = count
        return True


class Pipe:
    """The two streams between this rank and another one of the host, with the calls of a socket.

    Args:
        inbox: of this rank, from the other, uint8.
        outbox: the other's inbox from this rank, in its memory.
        naps: of the other rank.
        wake: wakes the other rank.
    """

    def __init__(self, inbox: Array, outbox: Array, naps: Naps, wake: Callable[[], object]) -> None:
        self._incoming, self._arrived = _split(inbox)
        self._outgoing, self._sent = _split(outbox)
        self._size = len(self._incoming)
        self._naps, self._wake = naps, wake
        self._taken = self._written = 0
        self._waits = False
        self._fence = threading.Lock()

    def fileno(self) -> int:
        """Return -1, as the system knows nothing of it."""
        return -1

    def close(self) -> None:
        """Do nothing: the memory lives as long as a process maps it."""

    def has_more(self) -> bool:
        """Return whether the other rank has written bytes that are not read yet."""
        return bool(self._arrived[_WRITTEN] != self._taken)

    def has_room(self) -> bool:
        """Return whether bytes can be sent."""
        return bool(self._written - self._sent[_READ] < self._size)

    def sendmsg(self, parts: Sequence[memoryview], ancillary: object = (), flags: int = 0) -> int:
        """Write as much as there is room for, up to a part of the ring; return the number of bytes.

        Raises:
            BlockingIOError: there is no room.
        """
        room = self._size - self._written + self._sent[_READ]
        if not room:
            room = self._ask_for_room()
        if self._waits:
            self._waits = False
            self._sent[_WAITS] = 0
        begun, left = self._written, min(room, _TURN_BYTES)
        for part in parts:
            count = min(len(part), left)
            _put(self._outgoing, self._written % self._size, part[:count])
            self._written += count
            left -= count
        self._sent[_WRITTEN] = self._written
        self._wake_sleeper()
        return self._written - begun

    def recv_into(self, room: memoryview) -> int:
        """Read the bytes that are there, at most as many as `room` takes; return their number.

        Raises:
            BlockingIOError: there are none.
        """
        count: int = min(self._arrived[_WRITTEN] - self._taken, len(room))
        if not count:
            raise BlockingIOError
        at = self._taken % self._size
        first = min(count, self._size - at)
        room[:first] = self._incoming[at : at + first]
        if first < count:
            room[first:count] = self._incoming[: count - first]
        self._taken += count
        self._arrived[_READ] = self._taken
        if self._arrived[_WAITS]:
            self._wake_sleeper()
        return count

    def _ask_for_room(self) -> int:
        self._waits = True
        self._sent[_WAITS] = 1
        with self._fence:
            pass
        room: int = self._size - self._written + self._sent[_READ]
        if not room:
            raise BlockingIOError
        return room

    def _wake_sleeper(self) -> None:
        # Between the store and the look at the other's nap; it shows its nap before it looks at what was stored.
        with self._fence:
            pass
        if self._naps.is_new():
            self._wake()


def room_bytes(others: int) -> int:
    """Return the bytes that a rank's naps and inboxes take, with so many other ranks on its host."""
    together = max(min(_MOST_TOGETHER_BYTES, others * _MOST_BYTES), others * _LEAST_BYTES)
    return _LINE_BYTES + others * (_MARKS_BYTES + _LINE_BYTES) + together


def open_pipes(
    rank: int, ranks: Sequence[int], rooms: Mapping[int, Array], wake: Callable[[int], Callable[[], object]]
) -> tuple[Naps, dict[int, Pipe]]:
    """Return this rank's naps, and its pipes, by the other rank.

    Args:
        rank: this rank.
        ranks: all of the host, the same on each of them.
        rooms: by rank, the memory of this one and of those that see this one's and show theirs: uint8 of `room_bytes`.
        wake: from a rank, returns what wakes it.
    """
    each = _MARKS_BYTES + _ring_bytes(len(ranks) - 1)

    def inbox(owner: int, source: int) -> Array:
        start = _LINE_BYTES + [other for other in ranks if other != owner].index(source) * each
        return rooms[owner][start : start + each]

    pipes = {
        other: Pipe(inbox(rank, other), inbox(other, rank), Naps(rooms[other]), wake(other))
        for other in rooms
        if other != rank
    }
    return Naps(rooms[rank]), pipes


def _ring_bytes(others: int) -> int:
    each = min(_MOST_BYTES, _MOST_TOGETHER_BYTES // max(others, 1))
    return max(_LEAST_BYTES, each // _LINE_BYTES * _LINE_BYTES)


def _split(inbox: Array) -> tuple[memoryview, memoryview]:
    """Return an inbox's bytes, and its marks, int64."""
    # Memoryviews: an element of an array takes NumPy three times as long.
    return inbox[_MARKS_BYTES:].data, inbox[:_MARKS_BYTES].view(np.int64).data


def _put(ring: memoryview, at: int, part: memoryview) -> None:
    first = min(len(part), len(ring) - at)
    ring[at : at + first] = part[:first]
    if first < len(part):
        ring[: len(part) - first] = part[first:]
