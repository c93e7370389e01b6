"""The connections of a rank and the messages on them, moved by looks and waits.

Each message has a header: its key, its length, and a word on the call that it belongs to. A message without a posted
receive is kept; one that arrives while its receive is posted continues in the right place. A message's callback runs at
once, under the wire's lock, so that any look advances collectives.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from hocket.arrays import Array
from hocket.transport import forks
from hocket.transport.tcp.connection import Connection, Frame, FrameKind
from hocket.transport.tcp.pipe import Naps, Pipe, open_pipes
from hocket.transport.waiting import POLL_RESOLUTION_S

_SAYING_S = 1.0
_BOTH = select.EPOLLIN | select.EPOLLOUT
_NOTHING = np.empty(0, np.uint8)


class Key(NamedTuple):
    """The key by which messages are matched.

    Attributes:
        space: of the lane's messages, or of its collectives: a number unique in the job.
        rank: the other rank, numbered as in the job.
        round: of the message.
    """

    space: int
    rank: int
    round: int


class Receiver(Protocol):
    """A posted receive; called under the wire's lock."""

    def place(self, frame: Frame) -> Array | None:
        """Return the message's place [uint8, its length]; None, having noted the reason, if it does not fit."""

    def arrived(self) -> None:
        """Note that the message is received."""


class _UnexpectedMessage(NamedTuple):
    """A message without a posted receive."""

    frame: Frame
    data: Array


@dataclass(eq=False, slots=True)
class _Arriving:
    """The message that a connection is receiving.

    Attributes:
        connection: it.
        key: its key.
        frame: its header.
        data: its place.
        receiver: its posted receive; None if there is none yet.
        refused: whether its receiver has no place for it.
    """

    connection: Connection
    key: Key
    frame: Frame
    data: Array
    receiver: Receiver | None
    refused: bool


class Wire:
    """The connections of this rank to all others.

    Args:
        rank: this rank, numbered as in the job.
        sockets: connected to the others, non-blocking, by rank.
        ended: called with the exit status when another rank has ended the job.

    Attributes:
        lock: held while messages move.
        lost: the ranks whose connections were closed without notice, in the order of detection.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], ended: Callable[[int], None]) -> None:
        self.rank = rank
        self.lock = threading.RLock()
        self.lost: list[int] = []
        self._ended = ended
        self._connections = {other: Connection(other, held) for other, held in sockets.items()}
        self._sockets = {connection.number: connection for connection in self._connections.values()}
        self._pipes: dict[int, tuple[Pipe, Connection]] = {}  # by rank, each beside a socket
        self._naps: Naps | None = None
        self._arriving: dict[Connection, _Arriving] = {}
        self._posted: dict[Key, deque[Receiver]] = defaultdict(deque)
        self._kept: dict[Key, deque[_UnexpectedMessage]] = defaultdict(deque)
        self._closed: set[int] = set()
        self._moving = False
        self._sleepers = 0
        self._fence = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        for number in self._sockets:
            self._epoll.register(number, select.EPOLLIN)
        # A connection ends with its last descriptor: those of a forked process would hide this one's death.
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def share(self, ranks: Sequence[int], rooms: Mapping[int, Array]) -> None:
        """Send messages to ranks of this host by shared memory from now on; before the first one.

        Args:
            ranks, rooms: as of `open_pipes`.
        """
        self._naps, pipes = open_pipes(
            self.rank, ranks, rooms, lambda rank: partial(self._wake, self._connections[rank])
        )
        self._pipes = {rank: (pipe, Connection(rank, pipe)) for rank, pipe in pipes.items()}
        self._connections.update({rank: connection for rank, (_, connection) in self._pipes.items()})

    def _wake(self, asleep: Connection) -> None:
        """Wake a rank that waits for its pipe, by its socket."""
        if not asleep.send(Frame(0, 0, 0, 0, FrameKind.RUNG), _NOTHING, _nothing):
            self._listen(asleep)

    # ------------------------------------------------------------------------------------------------ sending

    def send(
        self, key: Key, data: Array, call: int, sent: Callable[[], None], kind: FrameKind = FrameKind.MESSAGE
    ) -> bool:
        """Send a message, as far as possible at once.

        Args:
            key: its space and round, and the receiving rank.
            data: uint8 [n]; the wire's until it is sent.
            call: a word on the call that it belongs to.
            sent: called later, when it is sent, if it is not now.
            kind: a message, or a notice in its place.

        Returns:
            Whether it is sent.
        """
        with self.lock:
            frame = Frame(key.space, key.round, data.nbytes, call, kind)
            if key.rank == self.rank:
                self._keep(key, frame, data.copy())
                return True
            connection = self._connections[key.rank]
            finished = connection.send(frame, data, sent)
            if connection.lost:
                self._lose(connection)
            elif not finished and connection.number >= 0:
                self._listen(connection)
            return finished

    def _listen(self, connection: Connection) -> None:
        """Poll the connection for room as long as messages wait to be sent."""
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.busy else 0)
        if connection.events != wanted and not connection.closed:
            connection.events = wanted
            self._epoll.modify(connection.number, wanted)

    # ---------------------------------------------------------------------------------------------- receiving

    def post(self, key: Key, receiver: Receiver) -> None:
        """Post `receiver` for the next message of `key`, which may be here already."""
        with self.lock:
            kept = self._kept.get(key)
            if kept:
                message = kept.popleft()
                if not kept:
                    del self._kept[key]
                self._hand_over(message, receiver)
                return
            for arriving in self._arriving.values():  # few
                if arriving.receiver is None and arriving.key == key:
                    self._divert(arriving, receiver)
                    return
            self._posted[key].append(receiver)

    def withdraw(self, key: Key, receiver: Receiver) -> None:
        """Withdraw a posted receive; a message that is arriving waits for another receive."""
        with self.lock:
            posted = self._posted.get(key)
            if posted and receiver in posted:
                posted.remove(receiver)
                if not posted:
                    del self._posted[key]
            for connection, arriving in self._arriving.items():
                if arriving.receiver is receiver:
                    arriving.receiver, arriving.refused = None, False
                    connection.move_into(np.empty_like(arriving.data))
                    arriving.data = connection.target

    def close(self, *spaces: int) -> None:
        """Drop messages of closed lanes, received and future ones."""
        with self.lock:
            self._closed.update(spaces)
            for key in [key for key in self._kept if key.space in spaces]:
                del self._kept[key]

    def _hand_over(self, message: _UnexpectedMessage, receiver: Receiver) -> None:
        place = receiver.place(message.frame)
        if place is not None:
            place[:] = message.data
            receiver.arrived()
        self._ring()

    def _divert(self, arriving: _Arriving, receiver: Receiver) -> None:
        """Direct the rest of a message to the receiver's place."""
        place = receiver.place(arriving.frame)
        arriving.receiver, arriving.refused = receiver, place is None
        if place is not None:
            arriving.connection.move_into(place)
            arriving.data = place

    def _keep(self, key: Key, frame: Frame, data: Array) -> None:
        posted = self._take_posted(key)
        if posted is not None:
            self._hand_over(_UnexpectedMessage(frame, data), posted)
        elif key.space not in self._closed:
            self._kept[key].append(_UnexpectedMessage(frame, data))

    def _take_posted(self, key: Key) -> Receiver | None:
        posted = self._posted.get(key)
        if not posted:
            return None
        receiver = posted.popleft()
        if not posted:
            del self._posted[key]
        return receiver

    # ----------------------------------------------------------------------------------------------- progress

    def advance(self) -> None:
        """Send and receive without waiting; return at once if another thread does so."""
        if self._moving or not self.lock.acquire(blocking=False):
            return
        try:
            self._moving = True
            for pipe, near in self._pipes.values():
                if pipe.has_more() or (near.busy and pipe.has_room()):
                    self._move(near, _BOTH)
            for number, events in self._epoll.poll(0):
                connection = self._sockets.get(number)
                if connection is not None:
                    self._move(connection, events)
        finally:
            self._moving = False
            self.lock.release()

    def sleep(self, is_over: Callable[[], bool], longest_s: float) -> None:
        """Sleep until messages can move or another thread has moved one, at most `longest_s`.

        Args:
            is_over: returns whether not to sleep; called under the lock.
            longest_s: seconds.
        """
        if longest_s < POLL_RESOLUTION_S:
            time.sleep(longest_s)
            return
        with self.lock:
            if is_over():
                return
            self._sleepers += 1
            if self._naps is not None:
                self._naps.begin()
        try:
            events = self._epoll.poll(0 if self._can_move() else longest_s)
        finally:
            with self.lock:
                self._sleepers -= 1
                if self._naps is not None:
                    self._naps.end(others=self._sleepers > 0)
        if any(number == self._bell for number, _ in events):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)

    def _can_move(self) -> bool:
        """Return whether a pipe has bytes, or room for those that wait, now that this rank shows that it sleeps."""
        with self._fence:
            pass
        return any(pipe.has_more() or (each.busy and pipe.has_room()) for pipe, each in self._pipes.values())

    def _ring(self) -> None:
        """Wake the threads that sleep, as their messages may have arrived."""
        if self._sleepers:
            os.eventfd_write(self._bell, self._sleepers)

    def _move(self, connection: Connection, events: int) -> None:
        if events & select.EPOLLOUT and connection.flush():
            self._ring()
        if events & ~select.EPOLLOUT:
            while not connection.lost and connection.receive():
                self._take(connection)
        if connection.lost:
            self._lose(connection)
        elif connection.number >= 0:
            self._listen(connection)

    def _take(self, connection: Connection) -> None:
        """Handle a complete header or message."""
        if connection.wants_header:
            self._begin(connection, connection.header())
            return
        arriving = self._arriving.pop(connection)
        connection.expect_header()
        if arriving.receiver is None:
            self._keep(arriving.key, arriving.frame, arriving.data)
        elif not arriving.refused:
            arriving.receiver.arrived()
        self._ring()

    def _begin(self, connection: Connection, frame: Frame) -> None:
        if frame.kind in (FrameKind.LEFT, FrameKind.RUNG):
            connection.left = frame.kind is FrameKind.LEFT
            self._ring()  # it may be another thread that sleeps
            return
        if frame.kind is FrameKind.ENDED:
            self._ended(frame.round)
        key = Key(frame.space, connection.rank, frame.round)
        receiver = self._take_posted(key)
        place = None if receiver is None else receiver.place(frame)
        data = np.empty(frame.nbytes, np.uint8) if place is None else place
        refused = receiver is not None and place is None
        self._arriving[connection] = _Arriving(connection, key, frame, data, receiver, refused)
        connection.expect(data)

    def _lose(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        if not connection.closed:
            self._epoll.unregister(connection.number)
            del self._sockets[connection.number]
            connection.close()
            if not (connection.left or self._left_by_pipe(connection.rank)):
                self.lost.append(connection.rank)
            self._ring()

    def _left_by_pipe(self, rank: int) -> bool:
        """Take what a rank that has ended has left in its pipe; return whether it has announced its end there."""
        if rank not in self._pipes:
            return False
        pipe, connection = self._pipes[rank]
        while pipe.has_more():
            while connection.receive():
                self._take(connection)
        connection.lost = True
        connection.close()
        return connection.left

    # ------------------------------------------------------------------------------------------------ the end

    @property
    def busy(self) -> bool:
        """Tell whether any message waits to be sent."""
        return any(connection.busy for connection in self._connections.values())

    @property
    def all_left(self) -> bool:
        """Tell whether all other ranks have announced that they leave."""
        return all(connection.left for connection in self._connections.values())

    def say(self, kind: FrameKind, number: int = 0) -> None:
        """Announce to all other ranks that this one leaves, or that it ends the job with an exit status."""
        end_s = time.monotonic() + _SAYING_S
        with self.lock:
            for connection in self._connections.values():
                connection.send(Frame(0, number, 0, 0, kind), _NOTHING, _nothing)
            while self.busy and time.monotonic() < end_s:
                time.sleep(POLL_RESOLUTION_S)
                for connection in self._connections.values():
                    connection.flush()

    def _leave_to_parent(self) -> None:
        if forks.forked:
            for connection in self._sockets.values():
                connection.close()
            self._pipes.clear()
            self._epoll.close()


def _nothing() -> None:
    pass
