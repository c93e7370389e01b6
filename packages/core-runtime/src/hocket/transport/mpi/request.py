"""Operations of MPI that are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.forks import check_no_fork, is_fork
from hocket.transport.host import Operation, ProcessLane
from hocket.transport.request import RANKS_DIVERGED

__all__ = ["MPIRequest", "Receive", "begun"]


def begun(lane: ProcessLane, what: str, call: Callable[[], Any]) -> Any:
    """Return MPI's request for an operation that `call` begins.

    Raises:
        TransportError: MPI refuses it; PeerLostError if that is because a rank has died.
    """
    check_no_fork()
    try:
        return call()
    except MPI.Exception as error:
        where = f"rank {lane.peer.world_rank}: {lane.name} ({what})"
        raise lane.peer.status.failures.explain(where, error) from error


class MPIRequest(Operation):
    """One non-blocking MPI operation; keeps its buffers alive.

    Args:
        request: MPI's own.
        buffers: what MPI reads and writes.
    """

    __slots__ = ("_buffers", "_request")

    def __init__(
        self, lane: ProcessLane, request: Any, what: str, *buffers: Array, other: int | None = None
    ) -> None:
        super().__init__(lane, what, other)
        self._request = request
        self._buffers = buffers
        lane.peer.progress.begin_message()

    def __del__(self) -> None:
        # MPI still reads and writes the buffers of a request that its caller has dropped.
        if self._request is not None and not is_fork() and not MPI.Is_finalized():
            self._lane.peer.progress.keep(self)

    def advance(self) -> bool:
        """Return whether the request has ended, however, after its caller has dropped it."""
        try:
            return self.done()
        except TransportError:
            return True

    def done(self) -> bool:
        if self._request is None:
            return True
        try:
            finished: bool = self._request.Test()
        except MPI.Exception as error:
            raise self._explain(error) from error
        if finished:
            self._release()
        return finished

    def _explain(self, error: MPI.Exception) -> TransportError:
        """Return what an error of this operation means."""
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


class Receive(MPIRequest):
    """A receive, which also checks that as many bytes came as were expected."""

    __slots__ = ()

    def done(self) -> bool:
        if self._request is None:
            return True
        status = MPI.Status()
        try:
            finished: bool = self._request.Test(status)
        except MPI.Exception as error:
            raise self._explain(error) from error
        if finished:
            expected, came = self._buffers[0].nbytes, status.Get_elements(MPI.BYTE)
            self._release()
            if came != expected:
                raise TransportError(
                    f"{self._describe()}: a message of {came} bytes came into a buffer of {expected}: {RANKS_DIVERGED}"
                )
        return finished

    def withdraw(self) -> None:
        if self._request is not None:
            self._request.Cancel()
            self._request.Wait()  # does not block: the receive is cancelled, or has its message
            self._release()
