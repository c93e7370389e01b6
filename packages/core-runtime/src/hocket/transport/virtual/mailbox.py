"""A mailbox that matches a lane's messages with posted receives."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeVar

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.request import RANKS_DIVERGED
from hocket.transport.virtual.request import VirtualRequest


def flat_bytes(data: Array, what: str) -> Array:
    """Return `data`'s memory as flat uint8.

    Raises:
        TransportError: it is not C-contiguous; the message starts with `what`.
    """
    if not data.flags.c_contiguous:
        raise TransportError(f"{what}: the buffer of shape {data.shape} is not C-contiguous")
    return data.reshape(-1).view("u1")


class _Posted(NamedTuple):
    buffer: Array  # flat uint8
    request: VirtualRequest


T = TypeVar("T")
_Queues = dict[tuple[int, int], deque[T]]


def _put(queues: _Queues[T], key: tuple[int, int], item: T) -> None:
    queues.setdefault(key, deque()).append(item)


def _take(queues: _Queues[T], key: tuple[int, int]) -> T | None:
    """Take the oldest item of `key`. Empty queues are dropped, as rounds do not repeat."""
    queue = queues.get(key)
    if queue is None:
        return None
    item = queue.popleft()
    if not queue:
        del queues[key]
    return item


class Mailbox:
    """The arrived messages and the posted receives of one rank on one lane.

    Both are keyed by (source, round), ranks being the group's; within a key the oldest message goes to the
    oldest receive.
    """

    def __init__(self, rank: int, lane: str) -> None:
        self._name = f"rank {rank}: lane {lane!r}"
        self._messages: _Queues[Array] = {}
        self._posted: _Queues[_Posted] = {}

    def deliver(self, source: int, round: int, message: Array) -> None:
        """Give the message to the receive that waits for it, or keep it."""
        key = (source, round)
        posted = _take(self._posted, key)
        if posted is None:
            _put(self._messages, key, message)
        else:
            self._fill(key, posted, message)

    def post(self, source: int, round: int, buffer: Array, request: VirtualRequest) -> None:
        """Finish `request` with the message that has arrived for it, or when one arrives."""
        key = (source, round)
        message = _take(self._messages, key)
        if message is None:
            _put(self._posted, key, _Posted(buffer, request))
        else:
            self._fill(key, _Posted(buffer, request), message)

    def withdraw(self, source: int, round: int, request: VirtualRequest) -> None:
        """Remove the posted receive of `request`, and end it."""
        key = (source, round)
        self._posted[key] = deque(posted for posted in self._posted[key] if posted.request is not request)
        if not self._posted[key]:
            del self._posted[key]
        request.finish()

    def close(self) -> None:
        """Fail the receives that are still posted."""
        for (source, round), posted in self._posted.items():
            for receive in posted:
                receive.request.fail(f"{self._name} was closed before round {round} came from rank {source}")
        self._posted.clear()
        self._messages.clear()

    def _fill(self, key: tuple[int, int], posted: _Posted, message: Array) -> None:
        if message.nbytes != posted.buffer.nbytes:
            source, round = key
            posted.request.fail(
                f"{self._name}, round {round}: rank {source} sent {message.nbytes} bytes, "
                f"but the receive was posted for {posted.buffer.nbytes}: {RANKS_DIVERGED}"
            )
            return
        posted.buffer[:] = message
        posted.request.finish()
