"""A window of exchanges that begin one after the other, so that the first are over first.

Messages that are under way together share the network, and arrive together: if a model's 54 layers are sent at once
over TCP, the first arrives as late as the last, and a forward that waits for it hides nothing. So a few are under way
at a time, and each that is over makes room for the next.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from hocket.segment.segment import Segment
from hocket.transport.peer import Peer

__all__ = ["SendWindow"]

# So much is under way while there is more to begin, at first and at most; what is over makes room for as much more. A
# forward waits for the first, which so shares the network with nothing; afterwards a megabyte keeps the network busy
# while nobody looks.
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 20


class _SegmentStarter(Protocol):
    """The part of an exchange that the window calls: it begins segments and checks them."""

    peer: Peer
    ordered: bool

    def start(self, segment: Segment) -> None: ...

    def under_way(self, segment: Segment) -> bool: ...


class SendWindow:
    """The segments of an exchange that wait for their turn, advanced by any wait of this process."""

    def __init__(self, exchange: _SegmentStarter) -> None:
        self._exchange = exchange
        self._waiting: dict[int, Segment] = {}
        self._begun: deque[Segment] = deque()
        self._begun_bytes = 0
        self._room_bytes = _FIRST_BYTES

    def __contains__(self, segment: Segment) -> bool:
        return segment.index in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, segment: Segment) -> None:
        """Begin a segment after those before it; at once on one host, or where the device keeps the order."""
        if self._exchange.ordered or not self._exchange.peer.shares_network:
            self._exchange.start(segment)
            return
        first = not self._waiting
        if first:
            self._forget_what_is_over()
            if not self._begun:
                self._room_bytes = _FIRST_BYTES
        self._waiting[segment.index] = segment
        if first:
            self._exchange.peer.progress.add(self.advance)

    def begin(self, segment: Segment) -> None:
        """Begin a segment now, and those before it."""
        while segment.index in self._waiting:
            self._begin_next()

    def advance(self) -> bool:
        """Begin the segments that there is room for; return whether that was the last."""
        while self._waiting:
            self._forget_what_is_over()
            if self._begun_bytes >= self._room_bytes:
                return False
            self._begin_next()
        return True

    def _forget_what_is_over(self) -> None:
        while self._begun and not self._exchange.under_way(self._begun[0]):
            over_bytes = self._begun.popleft().wire_bytes
            self._begun_bytes -= over_bytes
            self._room_bytes = min(self._room_bytes + over_bytes, _MOST_BYTES)

    def _begin_next(self) -> None:
        segment = self._waiting.pop(next(iter(self._waiting)))
        self._begun.append(segment)
        self._begun_bytes += segment.wire_bytes
        self._exchange.start(segment)
