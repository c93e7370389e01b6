"""Rings as they go through a pipe: whole words, written and read by Python here and by `hocket.kernels.program`."""

from __future__ import annotations

import struct

from hocket.transport.signals import Ring

__all__ = [
    "ELSEWHERE",
    "RING_KEY",
    "RING_MESSAGE",
    "RING_NBYTES",
    "RING_ROUND",
    "RING_SOURCE",
    "RING_WORDS",
    "WORD_BYTES",
    "pack_ring",
    "unpack_rings",
    "words_of_ring",
]

WORD_BYTES = 8  # int64
#: The words of a ring, as in `Ring`; behind them the message, filled up to whole words.
RING_KEY, RING_SOURCE, RING_MESSAGE, RING_ROUND, RING_NBYTES = range(5)
RING_WORDS = 5
#: In place of the message's length, where that comes on a lane.
ELSEWHERE = -1

_RING = struct.Struct(f"={RING_WORDS}q")


def words_of_ring(nbytes: int) -> int:
    """Return how many words a ring takes whose message has `nbytes`."""
    return RING_WORDS + -(-nbytes // WORD_BYTES)


def pack_ring(ring: Ring) -> bytes:
    """Return a ring as bytes."""
    nbytes = ELSEWHERE if ring.data is None else len(ring.data)
    packed = _RING.pack(ring.key, ring.source, ring.message, ring.round, nbytes)
    return (
        packed if ring.data is None else (packed + ring.data).ljust(WORD_BYTES * words_of_ring(nbytes), b"\0")
    )


def unpack_rings(packed: bytes) -> list[Ring]:
    """Return the rings that `packed` is made of."""
    rings = []
    start = 0
    while start < len(packed):
        key, source, number, round, nbytes = _RING.unpack_from(packed, start)
        message = start + _RING.size
        data = None if nbytes == ELSEWHERE else packed[message : message + nbytes]
        rings.append(Ring(key, source, number, round, data))
        start += WORD_BYTES * words_of_ring(max(nbytes, 0))
    return rings
