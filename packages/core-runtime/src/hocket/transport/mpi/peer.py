"""Peers over mpi4py: this process's endpoint in a communicator, and in MPI's world."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from hocket.arrays import Array
from hocket.errors import ExchangeTimeoutError, PeerLostError, TransportError
from hocket.transport.host import HostPeer, StatusBoard
from hocket.transport.host.endings import Endings, announce
from hocket.transport.host.peer import STUCK_AFTER_S
from hocket.transport.lane import Lane
from hocket.transport.mpi.board import open_board
from hocket.transport.mpi.failures import MPIFailures
from hocket.transport.mpi.lane import MPILane, gather_rows
from hocket.transport.mpi.pieces import fits
from hocket.transport.mpi.request import MPIRequest, begun
from hocket.transport.peer import Peer
from hocket.transport.pending import Progress
from hocket.transport.request import Finished, FunctionRequest, Request

# Of messages by which the ranks meet at a session's beginning, at most.
_ROUNDS = 32

_NO_COMMUNICATOR = (
    "each segment of an exchange takes one of MPI's communicators, of which MPICH has 2,048 for a process: use fewer, "
    "larger segments, or fewer exchanges"
)


class MPIPeer(HostPeer):
    """An endpoint of this process in a communicator.

    Args:
        comm: an mpi4py communicator, owned from now on.
        board: the status board of this host's ranks; None in a job of one rank.
        ranks: the group's ranks in the job; all of them where None.
        progress: the process's unfinished operations, one for the world and all of its groups.
        failures: the dead among the job's ranks, one for the world and all of its groups.
        session: as of `HostStatus`.
    """

    transport = "mpi"

    def __init__(
        self,
        comm: MPI.Comm,
        board: StatusBoard | None,
        ranks: Sequence[int] | None = None,
        progress: Progress | None = None,
        failures: MPIFailures | None = None,
        session: int = 0,
    ) -> None:
        self.failures = MPIFailures(comm) if failures is None else failures
        super().__init__(
            comm.rank,
            range(comm.size) if ranks is None else ranks,
            board,
            # A call that makes progress.
            Progress(MPI.COMM_SELF.Iprobe) if progress is None else progress,
            self.failures,
            session,
        )
        self._comm = comm
        self._groups: dict[tuple[int, ...], MPI.Comm] = {}
        self._frees_own = False
        self._control = MPILane(self, comm, "control")

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        apart = self._agree_on_call(f"opening {name}", int(self.size > 1 and self.status.spans_hosts))
        try:
            comm, request = begun(self._control, f"opening {name}", self._comm.Idup)
            MPIRequest(self._control, f"opening {name}", lambda: request).wait()
        except (ExchangeTimeoutError, PeerLostError):
            raise
        except TransportError as error:
            raise TransportError(f"{error}: {_NO_COMMUNICATOR}") from error
        return MPILane(self, comm, name, capacity_bytes, between_hosts=any(apart))

    def group(self, ranks: Sequence[int]) -> Peer | None:
        members = tuple(ranks)
        member = self.rank in members
        known = member and members in self._groups
        # Made once, as MPI's communicators are few: again only where some rank does not know its group yet.
        if not all(self._agree_on_call("forming a group", known or not member)):
            colour, key = (min(members), members.index(self.rank)) if member else (MPI.UNDEFINED, 0)
            comm = begun(self._control, "forming a group", lambda: self._comm.Split(colour, key))
            if member:
                self._groups[members] = comm
        if not member:
            return None
        ranks = [self.world_ranks[rank] for rank in members]
        peer = self._part(self._groups[members], ranks, self.status.session)
        peer.timeout_s = self.timeout_s
        return peer

    def _open_session(self, number: int, key: int) -> MPIPeer:
        """Make a session's communicator once all ranks ask for the same one, as MPI matches collectives by order.

        They agree by messages, log2(n) rounds of them, whose tags hold the session: a rank that waits in another
        session is not taken for one that is here.
        """
        what = f"beginning session {number}"
        waiting = MPILane(self._part(self._comm, self.world_ranks, key), self._comm, "hocket.attach")
        word, distance, turn = np.zeros(1, np.uint8), 1, number * _ROUNDS
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            sent = waiting.isend(word, to, turn)
            receiving = waiting.irecv(np.empty(1, np.uint8), source, turn)
            assert isinstance(receiving, MPIRequest)  # a byte is one piece
            receiving.wait(is_in_vain=lambda: self.status.is_waited_for(waiting.name, STUCK_AFTER_S))
            sent.wait()
            distance, turn = 2 * distance, turn + 1
        comm, request = begun(waiting, what, self._comm.Idup)
        MPIRequest(waiting, what, lambda: request).wait()
        peer = self._part(comm, self.world_ranks, key)
        peer._frees_own = True
        return peer

    def _part(self, comm: MPI.Comm, world_ranks: Sequence[int], session: int) -> MPIPeer:
        return MPIPeer(comm, self.status.board, world_ranks, self.progress, self.failures, session)

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        lengths = self._agree_on_call("allgather", len(data), timeout_s, what)
        gathered = np.empty(sum(lengths), dtype=np.uint8)
        mine = np.frombuffer(data, dtype=np.uint8)
        starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        if not fits(gathered):
            rows = [gathered[starts[rank] : starts[rank + 1]] for rank in range(self.size)]
            rows[self.rank][:] = mine
            gather_rows(self._control, self._comm, "allgather", rows).wait(timeout_s)
            return [row.tobytes() for row in rows]
        everyones = [gathered, lengths, starts[:-1].tolist(), MPI.BYTE]
        begin = partial(self._comm.Iallgatherv, [mine, MPI.BYTE], everyones)
        MPIRequest(self._control, "allgather", begin, mine, gathered).wait(timeout_s)
        return [gathered[starts[rank] : starts[rank + 1]].tobytes() for rank in range(self.size)]

    def on_device(self, device: str) -> Peer | None:
        from hocket.transport.device.lanes import open_on_device

        return open_on_device(self, device)

    @property
    def control(self) -> MPILane:
        return self._control

    def _gather_words(self, own: Array, everyones: Array, what: str) -> MPIRequest:
        begin = partial(self._comm.Iallgather, own, everyones)
        return MPIRequest(self._control, what, begin, own, everyones)

    def leave(self, where: str) -> Request:
        if MPI.Is_finalized():
            return Finished()
        leaving = begun(self._control, "leaving", MPI.COMM_WORLD.Ibarrier)

        def done() -> bool:
            try:
                return bool(leaving.Test())
            except MPI.Exception as error:
                raise self.failures.explain(where, error) from error

        return FunctionRequest(done, lambda timeout_s: leaving.Wait())

    def abort(self, message: str, code: int = 1) -> NoReturn:
        announce(message, code)
        MPI.COMM_WORLD.Abort(code)
        raise SystemExit(code)

    def close(self) -> None:
        """Wait for all ranks, and free the communicators that were made here, as processes have few.

        Groups' live as long as the peer that made them, which keeps them for the next time.
        """
        self.threads.check_ended()
        self._agree_on_call("closing the peer")
        own = [self._comm] if self._frees_own else []
        for comm in (*self._groups.values(), *own):
            comm.Free()
        self._groups.clear()


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
        board = open_board(comm)
        _world = MPIPeer(comm, board, failures=MPIFailures(comm, board))
        if comm.size > 1:
            Endings(_world).install()
    return _world
