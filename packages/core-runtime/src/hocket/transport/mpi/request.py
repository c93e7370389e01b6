"""Operations that are under way, over MPI or over shared memory, and how they are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from mpi4py import MPI

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.host import HostExchange
from hocket.transport.mpi.forks import check_no_fork, is_fork
from hocket.transport.mpi.stall import Place, describe_stall
from hocket.transport.request import RANKS_DIVERGED, Request
from hocket.transport.waiting import CHECK_EVERY_S, LONG_WAIT_S, poll_briefly, wait_until

if TYPE_CHECKING:
    from hocket.transport.mpi.lane import MPILane

__all__ = ["HostRequest", "MPIRequest", "Operation", "Receive", "begun"]


class Operation(Request):
    """An operation on a lane, and how it is waited for.

    Args:
        lane: where it takes place.
        what: the operation, for messages.
        other: the rank at the other end of a message, or that broadcasts; None where all wait for all.
    """

    __slots__ = ("_lane", "_other", "_what")

    _yields: ClassVar[bool] = False

    def __init__(self, lane: MPILane, what: str, other: int | None = None) -> None:
        check_no_fork()
        self._lane = lane
        self._what = what
        self._other = other

    def wait(self, timeout_s: float | None = None) -> Any:
        check_no_fork()
        peer = self._lane.peer
        look = self._look if peer.host_progress.busy else self.done
        if look():
            return self.result
        expected_s = peer.waits.expected_s()
        if not expected_s and self._may_be_brief() and poll_briefly(look, self._yields):
            return self.result
        peer.status.note_waiting(self._what, self._lane.name)
        timeout_s = peer.timeout_s if timeout_s is None else timeout_s
        took_s = wait_until(self._look_around, timeout_s, self._describe_stall, expected_s, self._sleep)
        peer.waits.ended(took_s)
        self._lane.last_wait_s = took_s
        peer.status.note_computing()
        return self.result

    def _may_be_brief(self) -> bool:
        """Return whether to look without a pause at first, which other ranks may have to pay with their core."""
        return True

    def _sleep(self, longest_s: float) -> None:
        """Sleep before another look, at most for `longest_s`."""
        time.sleep(longest_s)

    def _look(self) -> bool:
        """Advance everything that other ranks need of this one, and return whether this is done."""
        self._lane.peer.host_progress.advance()
        return self.done()

    def _look_around(self) -> bool:
        """Do the same, and look whether all ranks still live: over shared memory no call of MPI fails."""
        self._lane.peer.failures.check(self._describe)
        return self._look()

    def _describe(self) -> str:
        return f"rank {self._lane.peer.world_rank}: {self._lane.name} ({self._what})"

    def _awaited(self) -> list[int]:
        """Return the ranks of the lane that this waits for, or may wait for."""
        others = [rank for rank in range(self._lane.size) if rank != self._lane.rank]
        return others if self._other is None or self._other == self._lane.rank else [self._other]

    def _describe_stall(self, outcome: str) -> str:
        peer = self._lane.peer
        ranks = [peer.world_rank_of(rank) for rank in self._awaited()]
        place = Place(self._lane.name, self._what, ranks, together=self._other is None)
        return describe_stall(peer.world_rank, place, peer.rows(), outcome)


def begun(lane: MPILane, what: str, call: Callable[[], Any]) -> Any:
    """Return MPI's request for an operation that `call` begins.

    Raises:
        TransportError: MPI refuses it; PeerLostError if that is because a rank has died.
    """
    check_no_fork()
    try:
        return call()
    except MPI.Exception as error:
        where = f"rank {lane.peer.world_rank}: {lane.name} ({what})"
        raise lane.peer.failures.explain(where, error) from error


class MPIRequest(Operation):
    """One non-blocking MPI operation; keeps its buffers alive.

    Args:
        request: MPI's own.
        buffers: what MPI reads and writes.
    """

    __slots__ = ("_buffers", "_request")

    def __init__(
        self, lane: MPILane, request: Any, what: str, *buffers: Array, other: int | None = None
    ) -> None:
        super().__init__(lane, what, other)
        self._request = request
        self._buffers = buffers
        lane.peer.host_progress.count_messages(1)

    def __del__(self) -> None:
        # MPI still reads and writes the buffers of a request that its caller has dropped.
        if self._request is not None and not is_fork() and not MPI.Is_finalized():
            self._lane.peer.adopt(self)

    def done(self) -> bool:
        if self._request is None:
            return True
        try:
            finished = self._request.Test()
        except MPI.Exception as error:
            raise self._explain(error) from error
        if finished:
            self._release()
        return finished

    def _explain(self, error: MPI.Exception) -> TransportError:
        """Return what an error of this operation means."""
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            return self._lane.peer.failures.explain(self._describe(), error)
        expected = max((buffer.nbytes for buffer in self._buffers), default=0)
        others = self._lane.peer.status.describe()
        return TransportError(
            f"{self._describe()}: more came than the {expected} bytes that were expected: {RANKS_DIVERGED}"
            + (f"; {others}" if others else "")
        )

    def _release(self) -> None:
        self._request = None
        self._buffers = ()
        self._lane.peer.host_progress.count_messages(-1)


class HostRequest(Operation):
    """An exchange over memory that the host's ranks share."""

    __slots__ = ("_exchange",)

    _yields = True

    def __init__(self, lane: MPILane, exchange: HostExchange, what: str) -> None:
        super().__init__(lane, what)
        self._exchange = exchange
        lane.peer.host_progress.add(exchange)

    def done(self) -> bool:
        finished = self._exchange.advance()
        if self._exchange.error is not None:
            raise self._exchange.error
        return finished

    @property
    def result(self) -> tuple[int, ...]:
        return self._exchange.nonfinite

    def _look_around(self) -> bool:
        if self._lane.peer.host_progress.messages:
            MPI.COMM_SELF.Iprobe()  # a call that makes progress: over shared memory there is none
        return super()._look_around()

    def _may_be_brief(self) -> bool:
        return self._lane.last_wait_s < LONG_WAIT_S

    def _sleep(self, longest_s: float) -> None:
        # Another rank's mark wakes it. What else is under way here may need it sooner, and wakes nobody.
        alone = self._lane.peer.host_progress.is_only(self._exchange)
        self._exchange.sleep(CHECK_EVERY_S if alone else longest_s)

    def _awaited(self) -> list[int]:
        return self._exchange.others


class Receive(MPIRequest):
    """A receive, which also checks that as many bytes came as were expected."""

    __slots__ = ()

    def done(self) -> bool:
        if self._request is None:
            return True
        status = MPI.Status()
        try:
            finished = self._request.Test(status)
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
