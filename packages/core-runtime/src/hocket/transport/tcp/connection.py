"""A connection: it sends frames in order, and receives them into given places."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from hocket.arrays import Array

_HEADER = struct.Struct("<QqQIi")
# Small messages and headers are read together.
_BUFFER_BYTES = 1 << 16
# What is longer is read straight into its place.
_DIRECT_BYTES = 1 << 13
# After so many bytes of a message it is the other connections' turn.
_TURN_BYTES = 1 << 20


class FrameKind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 0
    #: The rank has reached its end as the others have.
    LEFT = 1
    #: The rank ends the job; the round is the exit status.
    ENDED = 2
    #: In place of a message: the rank has failed in the collective.
    GIVEN_UP = 3
    #: On a socket: something has come by the pipe in shared memory, for a rank that sleeps.
    RUNG = 4


class Frame(NamedTuple):
    """The header of a message.

    Attributes:
        space: see `Key`.
        round: likewise.
        nbytes: of the message.
        call: a word on the call that it belongs to; 0 for plain messages.
        kind: of the frame.
    """

    space: int
    round: int
    nbytes: int
    call: int
    kind: FrameKind = FrameKind.MESSAGE


class Stream(Protocol):
    """The calls of a socket that a connection needs; see `socket.socket`."""

    def fileno(self) -> int: ...

    def sendmsg(self, parts: list[memoryview], ancillary: tuple[()], flags: int, /) -> int: ...

    def recv_into(self, room: memoryview, /) -> int: ...

    def close(self) -> None: ...


class _OutgoingFrame:
    __slots__ = ("parts", "sent")

    def __init__(self, parts: list[memoryview], sent: Callable[[], None]) -> None:
        self.parts, self.sent = parts, sent


class Connection:
    """A connection to another rank.

    Args:
        rank: the other rank.
        held: the socket, non-blocking, or a pipe in shared memory.

    Attributes:
        number: its descriptor; -1 for a pipe.
        events: the events that it is polled for.
        lost: whether the other end has closed it, or cannot be reached.
        left: whether the other rank has announced that it leaves.
        closed: whether this end has closed it.
        target: the place of the incoming message.
        wants_header: whether a header comes next.
    """

    def __init__(self, rank: int, held: Stream) -> None:
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
        self.wants_header = True
        self._dry = False  # the last read took all that was there

    # ------------------------------------------------------------------------------------------------ sending

    @property
    def busy(self) -> bool:
        """Tell whether any message waits to be sent."""
        return bool(self._outgoing) and not self.lost

    def send(self, frame: Frame, data: Array, sent: Callable[[], None]) -> bool:
        """Send a frame and its message, as far as possible at once.

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
        """Send as much as possible; return whether any message is completed."""
        any_sent = False
        while self.busy and self._write(self._outgoing[0].parts):
            any_sent = True
            self._outgoing.popleft().sent()
        return any_sent

    def _write(self, parts: list[memoryview]) -> bool:
        """Write as much as the socket takes, and leave the rest in `parts`; return whether all is written."""
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
        """Receive the next message into `data`, uint8."""
        self.target, self._target = data, data.data
        self._got, self.wants_header = 0, False

    def move_into(self, data: Array) -> None:
        """Continue the incoming message at another place, and copy the received part there."""
        data[: self._got] = self.target[: self._got]
        self.target, self._target = data, data.data

    def expect_header(self) -> None:
        """Prepare to receive a header next."""
        self._got = 0
        self.target, self._target = np.empty(0, np.uint8), memoryview(b"")
        self.wants_header = True

    def header(self) -> Frame:
        """Return the received header."""
        space, round, nbytes, call, kind = _HEADER.unpack_from(self._buffer, self._begin)
        self._begin += _HEADER.size
        return Frame(space, round, nbytes, call, FrameKind(kind))

    def receive(self) -> bool:
        """Read what is there, or a good part; return whether the expected message is complete."""
        turn = self._got + _TURN_BYTES
        while True:
            if self.wants_header:
                if self._end - self._begin >= _HEADER.size:
                    return True
            elif self._take_buffered():
                return True
            if self._dry or self._got > turn or not self._read():
                self._dry = False
                return False

    def _take_buffered(self) -> bool:
        """Move the buffer's content to its place; return whether the message is complete."""
        count = min(self._end - self._begin, len(self._target) - self._got)
        if count:
            self._target[self._got : self._got + count] = self._buffer[self._begin : self._begin + count]
            self._begin += count
            self._got += count
        return self._got == len(self._target)

    def _read(self) -> bool:
        """Read once; return whether any bytes arrived."""
        room = self._target
        try:
            if not self.wants_header and len(self._target) - self._got >= _DIRECT_BYTES:
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
        """Close the connection, and drop unsent messages."""
        self.closed = True
        self._outgoing.clear()
        with contextlib.suppress(OSError):
            self._socket.close()
