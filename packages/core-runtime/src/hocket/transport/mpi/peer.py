"""Peers, lanes and requests over mpi4py.

Each lane is a communicator of its own: native collectives match by call order within it, and messages by
(source, round), the round being the tag. Nothing blocks inside MPI but Init and Finalize: calls that have no
non-blocking form (splitting a communicator, freeing one) come after a barrier that is polled with a timeout,
so that everyone is there when they are made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import mpi4py
import numpy as np

mpi4py.rc.thread_level = "multiple"
# Open MPI's UCX component prints an error for each shared window, and is not used for them.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# MPI is initialised by this import: a process that never asks for the transport never starts MPI.
from mpi4py import MPI  # noqa: E402

from hocket.errors import TransportError  # noqa: E402
from hocket.transport.host import (  # noqa: E402
    MARK_BYTES,
    SMALLEST_BYTES,
    HostAllreduce,
    HostLane,
    HostMemory,
    HostProgress,
    share_bytes,
    shared_views,
)
from hocket.transport.mpi.board import Board, Row, State  # noqa: E402
from hocket.transport.mpi.endings import Endings  # noqa: E402
from hocket.transport.mpi.stall import Place, describe_stall, summarise  # noqa: E402
from hocket.transport.peer import Array, Lane, Peer, Request  # noqa: E402
from hocket.transport.waiting import poll_briefly, wait_until  # noqa: E402

__all__ = ["MPIPeer", "join"]

# A lane remembers where so many arrays lie in shared memory.
_SHARED_REMEMBERED = 64

_world: MPIPeer | None = None


def join() -> MPIPeer:
    """Return this process's endpoint in MPI's world, the same object each time; collective the first time.

    From then on an uncaught exception, `sys.exit` or Ctrl-C on one rank ends the whole job (see `endings`).

    Raises:
        TransportError: MPI does not allow calls from several threads.
    """
    global _world
    if _world is None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise TransportError(
                "MPI was initialised without THREAD_MULTIPLE: import hocket before mpi4py.MPI, or set "
                "mpi4py.rc.thread_level = 'multiple'"
            )
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        board = Board(comm) if comm.size > 1 else None
        _world = MPIPeer(comm, board)
        if comm.size > 1:
            Endings(_world, board).install()
    return _world


class _Operation(Request):
    """An operation on a lane, and how it is waited for.

    Args:
        lane: where it takes place.
        what: the operation, for messages.
        other: the rank at the other end of a message, or that broadcasts; None where all wait for all.
    """

    __slots__ = ("_lane", "_other", "_what")

    _yields: ClassVar[bool] = False

    def __init__(self, lane: MPILane, what: str, other: int | None = None) -> None:
        self._lane = lane
        self._what = what
        self._other = other

    def wait(self, timeout_s: float | None = None) -> None:
        peer = self._lane.peer
        if poll_briefly(self._look if peer.host_progress.busy else self.done, self._yields):
            return
        peer.note_waiting(self._what, self._lane.name)
        wait_until(self._look, peer.timeout_s if timeout_s is None else timeout_s, self._describe_stall)
        peer.note_computing()

    def _look(self) -> bool:
        """Advance everything that other ranks need of this one, and return whether this is done."""
        self._lane.peer.host_progress.advance()
        return self.done()

    def _describe(self) -> str:
        return f"rank {self._lane.peer.world_rank}: {self._lane.name} ({self._what})"

    def _describe_stall(self, outcome: str) -> str:
        peer = self._lane.peer
        others = [rank for rank in range(peer.size) if rank != peer.rank]
        awaited = others if self._other is None or self._other == peer.rank else [self._other]
        ranks = [peer.world_rank_of(rank) for rank in awaited]
        place = Place(self._lane.name, self._what, ranks, together=self._other is None)
        return describe_stall(peer.world_rank, place, peer.rows(), outcome)


class MPIRequest(_Operation):
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

    def __del__(self) -> None:
        # MPI still reads and writes the buffers of a request that its caller has dropped.
        if self._request is not None:
            self._lane.peer.adopt(self)

    def done(self) -> bool:
        if self._request is None:
            return True
        try:
            finished = self._request.Test()
        except MPI.Exception as error:
            raise TransportError(f"{self._describe()}: {error.Get_error_string()}") from error
        if finished:
            self._release()
        return finished

    def _release(self) -> None:
        self._request = None
        self._buffers = ()


class _HostRequest(_Operation):
    """An exchange over memory that the host's ranks share."""

    __slots__ = ("_exchange",)

    _yields = True

    def __init__(self, lane: MPILane, exchange: HostAllreduce, what: str) -> None:
        super().__init__(lane, what)
        self._exchange = exchange
        lane.peer.host_progress.add(exchange)

    def done(self) -> bool:
        return self._exchange.advance()


class _Receive(MPIRequest):
    """A receive, which also checks that as many bytes came as were expected."""

    __slots__ = ()

    def done(self) -> bool:
        if self._request is None:
            return True
        status = MPI.Status()
        try:
            finished = self._request.Test(status)
        except MPI.Exception as error:
            raise TransportError(f"{self._describe()}: {error.Get_error_string()}") from error
        if finished:
            expected, came = self._buffers[0].nbytes, status.Get_elements(MPI.BYTE)
            self._release()
            if came != expected:
                raise TransportError(
                    f"{self._describe()}: a message of {came} bytes came into a buffer of {expected}"
                )
        return finished


class MPILane(Lane):
    """A communicator of its own.

    Args:
        host: for allreduces over shared memory; None where messages are all there is.
    """

    def __init__(self, peer: MPIPeer, comm: Any, name: str, host: HostLane | None = None) -> None:
        self.peer = peer
        self._host = host
        self._shared: dict[int, tuple[Array, list[Array]]] = {}
        self.name = name
        self.rank, self.size = peer.rank, peer.size
        self._comm = comm
        self._tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1

    def isend(self, data: Array, to: int, round: int) -> Request:
        request = self._comm.Isend([_bytes(data), MPI.BYTE], to, round % self._tags)
        what = f"send to rank {self.peer.world_rank_of(to)}, round {round}"
        return MPIRequest(self, request, what, data, other=to)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        request = self._comm.Irecv([_bytes(data), MPI.BYTE], source, round % self._tags)
        what = f"receive from rank {self.peer.world_rank_of(source)}, round {round}"
        return _Receive(self, request, what, data, other=source)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        if self._host is not None and self._host.suits(send):
            contributions = self._everybodys(send)
            if contributions is not None:
                return _HostRequest(self, self._host.start(contributions, receive), "allreduce")
        return MPIRequest(self, self._comm.Iallreduce(send, receive, MPI.SUM), "allreduce", send, receive)

    def ibroadcast(self, data: Array, root: int) -> Request:
        what = f"broadcast from rank {self.peer.world_rank_of(root)}"
        return MPIRequest(self, self._comm.Ibcast([_bytes(data), MPI.BYTE], root), what, data, other=root)

    def ibarrier(self) -> Request:
        return MPIRequest(self, self._comm.Ibarrier(), "barrier")

    def close(self) -> None:
        self.ibarrier().wait()
        self._comm.Free()

    def _everybodys(self, send: Array) -> list[Array] | None:
        """Return what lies at `send`'s place on every rank, or None if it is not in shared memory."""
        known = self._shared.get(id(send))
        if known is not None:
            return known[1]
        peer = self.peer
        views = shared_views(send, [peer.world_rank_of(rank) for rank in range(self.size)], peer.world_rank)
        if views is not None:
            if len(self._shared) >= _SHARED_REMEMBERED:
                self._shared.clear()
            # With the array itself, so that its id stays its own.
            self._shared[id(send)] = (send, views)
        return views


class MPIPeer(Peer):
    """This process's endpoint in a communicator.

    Args:
        comm: an mpi4py communicator, owned from now on.
        board: what the ranks of this host are doing; None in a job of one rank.
        ranks: the group's ranks in the job; all of them where None.
        host_progress: the process's exchanges over shared memory, one for the world and all of its groups.
    """

    transport = "mpi"

    def __init__(
        self,
        comm: Any,
        board: Board | None,
        ranks: Sequence[int] | None = None,
        host_progress: HostProgress | None = None,
    ) -> None:
        self._comm = comm
        self._board = board
        self._world_ranks = list(range(comm.size)) if ranks is None else list(ranks)
        self.rank, self.size = comm.rank, comm.size
        self._dropped: list[MPIRequest] = []
        self._control = MPILane(self, comm, "control")
        self.host_progress = HostProgress() if host_progress is None else host_progress
        self.memory = HostMemory(self)
        if board is None or not set(self._world_ranks) <= set(board.ranks):
            self.memory.refused = "the ranks are on several hosts"

    def adopt(self, request: MPIRequest) -> None:
        """Keep an unfinished request that its caller has dropped, and with it its buffers, until it is done."""
        self._dropped = [dropped for dropped in self._dropped if not dropped.done()]
        self._dropped.append(request)

    @property
    def world_rank(self) -> int:
        """This rank in the whole job."""
        return self._world_ranks[self.rank]

    def world_rank_of(self, rank: int) -> int:
        """Translate a rank of this group into the job's."""
        return self._world_ranks[rank]

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        comm, request = self._comm.Idup()
        MPIRequest(self._control, request, f"opening {name}").wait()
        return MPILane(self, comm, name, self._host_lane(capacity_bytes))

    def _host_lane(self, capacity_bytes: int) -> HostLane | None:
        if capacity_bytes < SMALLEST_BYTES or self.size == 1:
            return None
        everybodys = []
        for nbytes in (MARK_BYTES, share_bytes(capacity_bytes, self.size)):
            own = self.memory.allocate(nbytes)
            if own is None:
                return None
            views = shared_views(own, self._world_ranks, self.world_rank)
            assert views is not None
            everybodys.append(views)
        return HostLane(self.rank, *everybodys)

    def allocate(self, nbytes: int) -> Array:
        memory = self.memory.allocate(nbytes) if self.size > 1 else None
        return super().allocate(nbytes) if memory is None else memory

    def group(self, ranks: Sequence[int]) -> Peer | None:
        members = list(ranks)
        self._control.ibarrier().wait()
        member = self.rank in members
        comm = self._comm.Split(
            min(members) if member else MPI.UNDEFINED, members.index(self.rank) if member else 0
        )
        if not member:
            return None
        peer = MPIPeer(comm, self._board, [self._world_ranks[rank] for rank in members], self.host_progress)
        peer.timeout_s = self.timeout_s
        return peer

    def allgather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        lengths = np.zeros(self.size, dtype=np.int64)
        own = np.array([len(data)], dtype=np.int64)
        MPIRequest(self._control, self._comm.Iallgather(own, lengths), "allgather", own, lengths).wait(
            timeout_s
        )
        gathered = np.empty(int(lengths.sum()), dtype=np.uint8)
        mine = np.frombuffer(data, dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        request = self._comm.Iallgatherv(
            [mine, MPI.BYTE], [gathered, lengths.tolist(), starts[:-1].tolist(), MPI.BYTE]
        )
        MPIRequest(self._control, request, "allgather", mine, gathered).wait(timeout_s)
        return [gathered[starts[rank] : starts[rank + 1]].tobytes() for rank in range(self.size)]

    def now(self) -> float:
        return time.perf_counter()

    def rows(self) -> list[Row]:
        """Return what is known of the other ranks of the group: those of this host."""
        if self._board is None:
            return []
        return [row for row in self._board.others() if row.rank in self._world_ranks]

    def describe_waiting(self) -> str:
        told = summarise(self.rows())
        elsewhere = len(set(self._world_ranks) - set(self._board.ranks)) if self._board is not None else 0
        return "; ".join(filter(None, [told, f"{elsewhere} ranks are on other hosts" if elsewhere else ""]))

    def report_progress(self, step: int) -> None:
        if self._board is not None:
            self._board.step = step
            self._board.write(State.COMPUTING)

    def note_waiting(self, what: str, lane: str) -> None:
        """Show the other ranks of the host that this one waits."""
        if self._board is not None:
            self._board.write(State.WAITING, lane, what)

    def note_computing(self) -> None:
        """Show the other ranks of the host that this one computes again."""
        if self._board is not None:
            self._board.write(State.COMPUTING)

    def abort(self, message: str, code: int = 1) -> NoReturn:
        from hocket.transport.mpi.endings import end_job

        end_job(message, code)

    def close(self) -> None:
        """Wait until every rank is here; the communicator itself lives until MPI ends."""
        self._control.ibarrier().wait()


def _bytes(data: Array) -> Array:
    return data.reshape(-1).view(np.uint8)
