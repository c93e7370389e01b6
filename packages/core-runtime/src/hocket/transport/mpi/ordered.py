"""Native collectives whose calls must wait for their turn.

MPI matches the collectives of a communicator by their order, which has to be the same on every rank. A gathering is
two of them: its lengths, then, once all lengths are known, its bytes. When they are known differs between ranks, so
whatever is called on the lane meanwhile waits until the bytes are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.gathering import gathered
from hocket.transport.host import Operation, ProcessLane
from hocket.transport.mpi.pieces import fits, gather_rows
from hocket.transport.mpi.request import MPIRequest, begun

__all__ = ["CallOrder", "GatherRequest", "OrderedLane", "OrderedRequest"]


class _Caller(Protocol):
    def call(self) -> bool:
        """Make the native calls that can be made; return whether none is left to make. Never blocks."""


class CallOrder:
    """The operations of a lane that have native calls left to make, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._callers: deque[_Caller] = deque()

    @property
    def busy(self) -> bool:
        """Whether a native call made now would be out of order."""
        return bool(self._callers)

    def append(self, caller: _Caller) -> None:
        """Let `caller` make its calls after all that are here."""
        self._callers.append(caller)

    def advance(self) -> None:
        """Make the calls whose turn has come; never blocks."""
        while self._callers and self._callers[0].call():
            self._callers.popleft()


class OrderedLane(ProcessLane):
    """A lane whose native calls wait for their turn.

    Attributes:
        order: the operations that have calls left to make.
    """

    order: CallOrder


class OrderedRequest(Operation):
    """A native collective that was asked for before its turn.

    Args:
        begin: makes the call, and returns MPI's request.
        buffers: what MPI reads and writes.
    """

    __slots__ = ("_begin", "_begun", "_buffers")

    _lane: OrderedLane

    def __init__(
        self,
        lane: OrderedLane,
        begin: Callable[[], Any],
        what: str,
        *buffers: Array,
        other: int | None = None,
    ) -> None:
        super().__init__(lane, what, other)
        self._begin = begin
        self._buffers = buffers
        self._begun: MPIRequest | None = None
        lane.order.append(self)

    def call(self) -> bool:
        request = begun(self._lane, self._what, self._begin)
        self._begun = MPIRequest(self._lane, request, self._what, *self._buffers, other=self._other)
        return True

    def done(self) -> bool:
        if self._begun is None:
            self._lane.order.advance()
        return self._begun is not None and self._begun.done()


class GatherRequest(Operation):
    """Every rank's message, of lengths that differ: MPI's Iallgather of the lengths, then Iallgatherv of the bytes.

    Where these are too many for it each rank broadcasts its own.

    Args:
        comm: the lane's communicator.
        send: uint8 [n], this rank's message.
        receive: uint8 [size, capacity].
    """

    __slots__ = ("_bytes", "_comm", "_gathered_lengths", "_lengths", "_receive", "_send")

    _lane: OrderedLane

    def __init__(self, lane: OrderedLane, comm: Any, send: Array, receive: Array) -> None:
        super().__init__(lane, "allgather")
        self._comm = comm
        self._send = send
        self._receive = receive
        self._gathered_lengths = np.empty(lane.size, dtype=np.int64)
        self._lengths: MPIRequest | None = None
        self._bytes: Operation | None = None
        lane.order.append(self)
        # Who waits for something else calls for the bytes meanwhile: other ranks may wait for them.
        lane.peer.progress.add(self)

    def advance(self) -> bool:
        """Advance the lane, and return whether this rank's bytes are under way."""
        if self._bytes is None:
            self._lane.order.advance()
        return self._bytes is not None

    def call(self) -> bool:
        if self._lengths is None:
            own = np.array([self._send.size], dtype=np.int64)
            request = begun(
                self._lane, self._what, lambda: self._comm.Iallgather(own, self._gathered_lengths)
            )
            self._lengths = MPIRequest(self._lane, request, self._what, own, self._gathered_lengths)
        if not self._lengths.done():
            return False
        lengths, capacity = self._gathered_lengths.tolist(), self._receive.shape[1]
        if max(lengths) > capacity:
            rank = self._lane.peer.world_rank_of(lengths.index(max(lengths)))
            raise TransportError(
                f"{self._describe()}: rank {rank} sends {max(lengths)} bytes, where receive has room for "
                f"{capacity} here: give every rank the same capacity"
            )
        if not fits(self._receive):
            rows = gathered(self._receive, lengths)
            rows[self._lane.rank][:] = self._send
            self._bytes = gather_rows(self._lane, self._comm, self._what, rows)
            return True
        starts = [rank * capacity for rank in range(self._lane.size)]
        request = begun(
            self._lane,
            self._what,
            lambda: self._comm.Iallgatherv(
                [self._send, MPI.BYTE], [self._receive, lengths, starts, MPI.BYTE]
            ),
        )
        self._bytes = MPIRequest(self._lane, request, self._what, self._send, self._receive)
        return True

    def done(self) -> bool:
        return self.advance() and self._bytes is not None and self._bytes.done()

    @property
    def result(self) -> list[Array]:
        return gathered(self._receive, self._gathered_lengths.tolist())
