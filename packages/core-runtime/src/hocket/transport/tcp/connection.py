"""One connection: frames go out in their order, and come in into the places that are named for them."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hocket.arrays import Array

__all__ = ["Connection", "Frame", "FrameKind"]

_HEADER = struct.Struct("<QqQIi")
# Small messages and headers are read together.
_BUFFER_BYTES = 1 << 16
# What is longer is read straight into its place.
_DIRECT_BYTES = 1 << 13
# After so many bytes of a message it is the other connections' turn.
_TURN_BYTES = 1 << 20


class FrameKind(IntEnum):
    """What a frame says."""

    MESSAGE = 0
    #: The rank has come to its end as the others have.
    LEFT = 1
    #: The rank ends the job; the round is the exit status.
    ENDED = 2
    #: In place of a message: the rank has failed in the collective.
    GIVEN_UP = 3


class Frame(NamedTuple):
    """What stands before a message.

    Attributes:
        space: see `Key`.
        round: likewise.
        nbytes: of the message.
        call: a word on the call that it belongs to; 0 for plain messages.
        kind: whether it is one.
    """

    space: int
    round: int
    nbytes: int
    call: int
    kind: FrameKind = FrameKind.MESSAGE


class _OutgoingFrame:
    __slots__ = ("parts", "sent")

    def __init__(self, parts: list[memoryview], sent: Callable[[], None]) -> None:
        self.parts, self.sent = parts, sent


class Connection:
    """A connection to another rank.

    Args:
        rank: that one.
        held: the socket, non-blocking.

    Attributes:
        number: its descriptor.
        events: that it is looked at for.
        lost: whether the other end has closed it, or is not to be reached.
        left: whether the other rank has said that it leaves.
        closed: whether this end has closed it.
        target: where the message goes that is coming in.
    """

    def __init__(self, rank: int, held: socket.socket) -> None:
        self.rank = rank
        self.number = held.fileno()
        self.events = 1
        self.lost = self.left = self.closed = False
        self._socket = held
        self._outgoing: deque[_OutgoingFrame] = deque()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # of what is in the buffer
        self.target: Array = np.empty(0, np.uint8)
        self._target = memoryview(b"")
        self._got = 0
        self._wants_header = True
        self._dry = False  # the last read took all that was there

    # ------------------------------------------------------------------------------------------------ sending

    @property
    def busy(self) -> bool:
        """Whether anything is not sent that can still be."""
        return bool(self._outgoing) and not self.lost

    def send(self, frame: Frame, data: Array, sent: Callable[[], None]) -> bool:
        """Send a frame and its message, at least as far as it goes at once.

        Returns:
            Whether it is sent; if not, `sent` is called when it is.
        """
        parts = [memoryview(_HEADER.pack(*frame))]
        if data.nbytes:
            parts.append(data.data)
        if self.lost or self.closed:
            return False
        if not self._outgoing and self._write(parts):
            return True
        self._outgoing.append(_OutgoingFrame(parts, sent))
        return False

    def flush(self) -> bool:
        """Send what can be; return whether any message is sent."""
        any_sent = False
        while self.busy and self._write(self._outgoing[0].parts):
            any_sent = True
            self._outgoing.popleft().sent()
        return any_sent

    def _write(self, parts: list[memoryview]) -> bool:
        """Write what the socket takes, and leave the rest in `parts`; return whether that is all."""
        try:
            while parts:
                count = self._socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
                while parts and count >= len(parts[0]):
                    count -= len(parts.pop(0))
                if count:
                    parts[0] = parts[0][count:]
        except BlockingIOError:
            return False
        except OSError:
            self.lost = True
            return False
        return True

    # ---------------------------------------------------------------------------------------------- receiving

    def expect(self, data: Array) -> None:
        """Receive a message into `data`, uint8, next."""
        self.target, self._target = data, data.data
        self._got, self._wants_header = 0, False

    def move_into(self, data: Array) -> None:
        """Go on with the message that is coming in at another place, with what has come."""
        data[: self._got] = self.target[: self._got]
        self.target, self._target = data, data.data

    def expect_header(self) -> None:
        """Receive a header next."""
        self._got = 0
        self.target, self._target = np.empty(0, np.uint8), memoryview(b"")
        self._wants_header = True

    def header(self) -> Frame:
        """Return the header that has come."""
        space, round, nbytes, call, kind = _HEADER.unpack_from(self._buffer, self._begin)
        self._begin += _HEADER.size
        return Frame(space, round, nbytes, call, FrameKind(kind))

    def receive(self) -> bool:
        """Read what is there, or a good part; return whether what is expected has come whole."""
        turn = self._got + _TURN_BYTES
        while True:
            if self._wants_header:
                if self._end - self._begin >= _HEADER.size:
                    return True
            elif self._take_buffered():
                return True
            if self._dry or self._got > turn or not self._read():
                self._dry = False
                return False

    def _take_buffered(self) -> bool:
        """Move what is in the buffer to its place; return whether the message is whole."""
        count = min(self._end - self._begin, len(self._target) - self._got)
        if count:
            self._target[self._got : self._got + count] = self._buffer[self._begin : self._begin + count]
            self._begin += count
            self._got += count
        return self._got == len(self._target)

    def _read(self) -> bool:
        """Read once; return whether anything has come."""
        room = self._target
        try:
            if not self._wants_header and len(self._target) - self._got >= _DIRECT_BYTES:
                room = self._target[self._got :]
                count = self._socket.recv_into(room)
                self._got += count
            else:
                self._make_room()
                room = self._buffer[self._end :]
                count = self._socket.recv_into(room)
                self._end += count
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        self._dry = 0 < count < len(room)
        self.lost = count == 0
        return not self.lost

    def _make_room(self) -> None:
        left = self._end - self._begin
        if left:
            self._buffer[:left] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, left

    # ------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Give the connection up, and what was not sent."""
        self.closed = True
        self._outgoing.clear()
        with contextlib.suppress(OSError):
            self._socket.close()
