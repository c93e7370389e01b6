"""Operations of MPI, begun at once or in their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport import forks
from hocket.transport.host import ProcessLane
from hocket.transport.pending import PendingCall
from hocket.transport.request import RANKS_DIVERGED

T = TypeVar("T")


class CallOrder:
    """The native calls that a lane has left to make, in the order of their requests.

    MPI matches the collectives of a communicator by their order, which has to be the same on every rank. A gathering
    is two of them: its lengths, then, once all lengths are known, its bytes. That moment differs between ranks, so
    other calls on the lane wait until the bytes are being sent.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], bool]] = deque()

    def append(self, call: Callable[[], bool]) -> None:
        """Queue `call`, which makes native calls that are possible, and returns whether none is left."""
        self._calls.append(call)

    def advance(self) -> bool:
        """Make the calls whose turn it is, and return whether none is left; never blocks."""
        while self._calls:
            if not self._calls[0]():
                return False
            self._calls.popleft()
        return True


def begun(lane: ProcessLane, what: str, call: Callable[[], T]) -> T:
    """Return the result of `call`, which begins an operation of MPI.

    Raises:
        TransportError: MPI refuses it; PeerLostError if a rank has died.
    """
    if forks.forked:
        raise forks.explain()
    try:
        return call()
    except MPI.Exception as error:
        where = f"rank {lane.peer.world_rank}: {lane.name} ({what})"
        raise lane.peer.status.failures.explain(where, error) from error


class MPIRequest(PendingCall):
    """A non-blocking MPI operation; it keeps its buffers alive.

    Args:
        begin: makes the call, and returns MPI's request.
        buffers: the buffers that MPI reads and writes.
        receives: whether it is a message's receive: then the message must have as many bytes as the buffer.
        order: of the lane's collectives, if it is one: earlier requests make their calls first.
    """

    __slots__ = ("_begin", "_buffers", "_order", "_receives", "_request")

    _lane: ProcessLane

    def __init__(
        self,
        lane: ProcessLane,
        what: str,
        begin: Callable[[], MPI.Request],
        *buffers: Array,
        other: int | None = None,
        receives: bool = False,
        order: CallOrder | None = None,
    ) -> None:
        self._request: MPI.Request | None = None  # first, for `__del__`
        super().__init__(lane, what, other)
        self._begin: Callable[[], MPI.Request] | None = begin
        self._buffers = buffers
        self._receives = receives
        self._order = order
        if order is None or order.advance():
            self.call()
        else:
            order.append(self.call)

    def __del__(self) -> None:
        # MPI still reads and writes the buffers of a request that its caller has dropped.
        if self._request is not None and not forks.forked and not MPI.Is_finalized():
            self._lane.peer.progress.keep(self.advance)

    def call(self) -> bool:
        """Make the call, in its turn; return True, as none is left."""
        assert self._begin is not None
        self._request = begun(self._lane, self._what, self._begin)
        self._begin = None
        self._lane.peer.progress.begin_message()
        return True

    def advance(self) -> bool:
        """Return whether the request has ended, with success or not, after its caller has dropped it."""
        try:
            return self.done()
        except TransportError:
            return True

    def done(self) -> bool:
        if self._request is None:
            if self._begin is None:
                return True
            assert self._order is not None
            self._order.advance()
            if self._request is None:
                return False
        status = MPI.Status() if self._receives else None
        try:
            finished: bool = self._request.Test(status)
        except MPI.Exception as error:
            raise self._explain(error) from error
        if finished:
            expected = self._buffers[0].nbytes if status is not None else 0
            self._release()
            if status is not None and status.Get_elements(MPI.BYTE) != expected:
                raise TransportError(
                    f"{self._describe()}: a message of {status.Get_elements(MPI.BYTE)} bytes arrived for a buffer of "
                    f"{expected}: {RANKS_DIVERGED}"
                )
        return finished

    def withdraw(self) -> None:
        if not self._receives:
            super().withdraw()
        elif self._request is not None:
            self._request.Cancel()
            self._request.Wait()  # does not block: the receive is cancelled, or has its message
            self._release()

    def _explain(self, error: MPI.Exception) -> TransportError:
        """Return the error to raise for an error of this operation."""
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            return self._lane.peer.status.failures.explain(self._describe(), error)
        expected = max((buffer.nbytes for buffer in self._buffers), default=0)
        others = self._lane.peer.status.describe()
        return TransportError(
            f"{self._describe()}: more came than the {expected} bytes that were expected: {RANKS_DIVERGED}"
            + (f"; {others}" if others else "")
        )

    def _release(self) -> None:
        self._request = None
        self._buffers = ()
        self._lane.peer.progress.end_message()
