"""Allreduce over shared memory: each rank sums its share of everybody's buffer, then reads the others' shares.

Per rank that reads p n / p + n and writes n / p + n elements, where a ring of messages copies each of its
2 (p - 1) n / p elements several times. Two marks per rank and lane say how far it is: how many exchanges it has
made ready, and how many of its shares are summed. A rank makes an exchange ready only after it has read the one
before, so a share may be overwritten once everybody is ready again; a contribution may be overwritten once
everybody has summed, which is before the exchange is done.

Stores become visible in order on x86-64; elsewhere taking a lock orders them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from hocket.transport.peer import Array
from hocket.transport.reduction import TreeSum

__all__ = ["MARK_BYTES", "SMALLEST_BYTES", "HostAllreduce", "HostLane", "HostProgress", "share_bytes"]

MARK_BYTES = 64

#: Below this a message-based allreduce is faster: its waits are fewer and not Python's.
SMALLEST_BYTES = 2 << 20
_READY, _SUMMED = 0, 1
_fence = threading.Lock()


class HostLane:
    """What a lane needs for allreduces over shared memory.

    Args:
        rank: this rank among the lane's.
        marks: every rank's marks, by rank, [MARK_BYTES] uint8, zero at first; the own one is written.
        shares: every rank's summed share, by rank, uint8.
    """

    def __init__(self, rank: int, marks: Sequence[Array], shares: Sequence[Array]) -> None:
        self.rank, self.size = rank, len(marks)
        self._marks = [mark.view(np.int64) for mark in marks]
        self.shares = shares
        self._largest_bytes = self.size * shares[0].nbytes
        self.queue: deque[HostAllreduce] = deque()
        self._started = 0
        self._sums: dict[np.dtype[np.generic], TreeSum] = {}

    def suits(self, array: Array) -> bool:
        """Return whether the shares are large enough for `array`, and `array` for this to be the faster way."""
        return SMALLEST_BYTES <= array.nbytes <= self._largest_bytes

    def start(self, contributions: Sequence[Array], receive: Array) -> HostAllreduce:
        """Queue an allreduce; `contributions` are everybody's [n], by rank."""
        self._started += 1
        exchange = HostAllreduce(self, self._started, contributions, receive)
        self.queue.append(exchange)
        return exchange

    def mark(self, which: int, number: int) -> None:
        """Say that this rank has come to exchange `number`."""
        with _fence:
            self._marks[self.rank][which] = number

    def all_at(self, which: int, number: int) -> bool:
        """Return whether every rank has come to exchange `number`."""
        with _fence:
            return all(mark[which] >= number for mark in self._marks)

    def sum_for(self, dtype: np.dtype[np.generic]) -> TreeSum:
        """Return the sum of the lane's ranks for `dtype`."""
        if dtype not in self._sums:
            self._sums[dtype] = TreeSum(self.size, dtype)
        return self._sums[dtype]


class HostAllreduce:
    """One exchange; every `advance` does what can be done."""

    def __init__(self, lane: HostLane, number: int, contributions: Sequence[Array], receive: Array) -> None:
        self._lane = lane
        self._number = number
        self._contributions = contributions
        self._receive = receive.reshape(-1)
        self._begun = self._summed = self._done = False

    def advance(self) -> bool:
        """Do this rank's part as far as the other ranks are; return whether the exchange is done."""
        if self._done:
            return True
        lane = self._lane
        if not self._begun:
            while lane.queue[0] is not self:
                if not lane.queue[0].advance():
                    return False
            self._begun = True
            lane.mark(_READY, self._number)
        if not self._summed:
            if not lane.all_at(_READY, self._number):
                return False
            own = self._share(lane.rank)
            if own.start < own.stop:
                parts = [contribution[own] for contribution in self._contributions]
                lane.sum_for(self._receive.dtype)(parts, self._shared(lane.rank))
            self._summed = True
            lane.mark(_SUMMED, self._number)
        if not lane.all_at(_SUMMED, self._number):
            return False
        for offset in range(lane.size):
            # Ranks begin at different places: each share is read by one after the other.
            rank = (lane.rank + offset) % lane.size
            self._receive[self._share(rank)] = self._shared(rank)
        self._done = True
        lane.queue.popleft()
        return True

    def _share(self, rank: int) -> slice:
        numel = share_bytes(self._receive.nbytes, self._lane.size) // self._receive.itemsize
        size = self._receive.size
        return slice(min(rank * numel, size), min((rank + 1) * numel, size))

    def _shared(self, rank: int) -> Array:
        share = self._share(rank)
        return self._lane.shares[rank].view(self._receive.dtype)[: share.stop - share.start]


class HostProgress:
    """The exchanges of this process that are not done: whoever waits for one advances them all.

    Other ranks need this rank's share of each, and may wait for them in another order.
    """

    def __init__(self) -> None:
        self._unfinished: list[HostAllreduce] = []

    def add(self, exchange: HostAllreduce) -> None:
        """Begin an exchange."""
        if not exchange.advance():
            self._unfinished.append(exchange)

    @property
    def busy(self) -> bool:
        """Whether anything is not done."""
        return bool(self._unfinished)

    def advance(self) -> None:
        """Look once at everything that is not done."""
        if self._unfinished:
            self._unfinished = [exchange for exchange in self._unfinished if not exchange.advance()]


def share_bytes(nbytes: int, size: int) -> int:
    """Return the bytes of one rank's share of a buffer, whole cache lines."""
    return -(-nbytes // (size * 64)) * 64
