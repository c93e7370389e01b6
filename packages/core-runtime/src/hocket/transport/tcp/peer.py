"""Peers over the wire: this process's endpoint in a group of ranks, and in its job."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from torch.distributed import DistError

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.forks import note_rank
from hocket.transport.host import Failures, HostPeer, StatusBoard
from hocket.transport.host.endings import Endings, announce
from hocket.transport.host.memory import ORDERED
from hocket.transport.lane import Lane
from hocket.transport.meeting.attempt import join_attempt
from hocket.transport.meeting.board import JobBoard
from hocket.transport.meeting.rendezvous import Rendezvous
from hocket.transport.meeting.store import StoreRanks, open_store
from hocket.transport.peer import Peer
from hocket.transport.pending import PendingCall, Progress
from hocket.transport.request import FunctionRequest, Request
from hocket.transport.tcp.connecting import connect_all
from hocket.transport.tcp.connection import FrameKind
from hocket.transport.tcp.lane import TcpLane
from hocket.transport.tcp.pipe import room_bytes
from hocket.transport.tcp.wire import Wire
from hocket.transport.waiting import CHECK_EVERY_S

# A rank that fails has this time to say so before the next one does, in seconds.
_TURN_S = 0.3
_MOST_TURNS = 10

# Where a process of multiprocessing ends because another one has failed, it ends so much later, in seconds.
_PARENT_S = 0.5


class TcpPeer(HostPeer):
    """An endpoint of this process in a group of ranks.

    Args:
        wire: its connections.
        board: the status board of this host's ranks; None in a job of one rank.
        ranks: the group's, numbered as in the job.
        path: a name of the group, unique in the job and equal on all of its ranks.
        progress: the process's unfinished operations, one for the world and all of its groups.
        failures: the dead among the job's ranks, one for the world and all of its groups.
        session: as of `HostStatus`.
    """

    transport = "torch"

    def __init__(
        self,
        wire: Wire,
        board: StatusBoard | None,
        ranks: Sequence[int],
        path: str,
        progress: Progress,
        failures: Failures,
        session: int = 0,
    ) -> None:
        super().__init__(list(ranks).index(wire.rank), ranks, board, progress, failures, session)
        self.wire = wire
        self._path = path
        self._num_lanes = self._num_groups = 0
        self._control = TcpLane(self, wire, "control", f"{path} control")

    @property
    def control(self) -> TcpLane:
        return self._control

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        self._agree_on_call(f"opening {name}")
        self._num_lanes += 1
        return TcpLane(self, self.wire, name, f"{self._path} lane {self._num_lanes}", capacity_bytes)

    def group(self, ranks: Sequence[int]) -> Peer | None:
        """Return this rank's endpoint among `ranks`, in their order, or None if it is not there; collective.

        Raises:
            TransportError: a rank that named another group than its members did.
        """
        members = tuple(ranks)
        named = self._agree_on_call("forming a group", zlib.crc32(json.dumps(members).encode()))
        self._num_groups += 1
        if self.rank not in members:
            return None
        astray = [rank for rank in members if named[rank] != named[self.rank]]
        if astray:
            raise TransportError(
                f"rank {self.world_rank}: this rank forms a group of {[self.world_ranks[rank] for rank in members]}, "
                f"but rank {self.world_ranks[astray[0]]} forms another: name the same ranks on all of them"
            )
        path = f"{self._path} group {self._num_groups} {members}"
        world_ranks = [self.world_ranks[rank] for rank in members]
        peer = self._part(world_ranks, path, self.status.session)
        peer.timeout_s = self.timeout_s
        return peer

    def _open_session(self, number: int, key: int) -> TcpPeer:
        return self._part(self.world_ranks, f"{self._path} session {number}", key)

    def _part(self, world_ranks: Sequence[int], path: str, session: int) -> TcpPeer:
        status = self.status
        return TcpPeer(self.wire, status.board, world_ranks, path, self.progress, status.failures, session)

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        lengths = self._agree_on_call("allgather", len(data), timeout_s, what)
        receive = np.empty((self.size, max(lengths)), np.uint8)
        rows = self._control.iallgather(np.frombuffer(data, np.uint8), receive).wait(timeout_s)
        return [row.tobytes() for row in rows]

    def on_device(self, device: str) -> Peer | None:
        from hocket.transport.device.lanes import open_on_device

        return open_on_device(self, device)

    def _gather_words(self, own: Array, everyones: Array, what: str) -> PendingCall:
        return self._control.gather_words(own, everyones, what)

    def leave(self, where: str) -> Request:
        barrier = TcpLane(self, self.wire, "leaving", f"{self._path} leaving").ibarrier()
        has_said = False

        def done() -> bool:
            nonlocal has_said
            self.wire.advance()
            if self.wire.lost:
                raise self.status.failures.lost(where, self.wire.lost)
            if not has_said and barrier.done() and not self.wire.busy:
                self.wire.say(FrameKind.LEFT)
                has_said = True
            # A connection that is closed with unread data loses this rank's last messages.
            return has_said and self.wire.all_left

        return FunctionRequest(done, barrier.wait)

    def pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.wire.advance()
            self.wire.sleep(lambda: False, min(left_s, CHECK_EVERY_S))

    def abort(self, message: str, code: int = 1) -> NoReturn:
        if message:
            self._let_others_report()
        announce(message, code)
        self.wire.say(FrameKind.ENDED, code)
        os._exit(code)

    def _let_others_report(self) -> None:
        """Give lower ranks of other hosts time to end the job, if the board does not show which one reports."""
        board = self.status.board
        if isinstance(board, JobBoard):
            first = [
                rank for rank in board.unheard() if rank < self.world_rank and rank not in self.wire.lost
            ]
            self.pause(_TURN_S * min(len(first), _MOST_TURNS))

    def close(self) -> None:
        """Wait for all ranks; the connections stay open until the process ends."""
        self.threads.check_ended()
        self._agree_on_call("closing the peer")


class TcpFailures(Failures):
    """The dead ranks: those whose connections were closed without notice.

    Args:
        wire: the connections.
        board: the status board, which gets this rank's state during looks.
        store: the job's, which rank 0 may run.
    """

    def __init__(self, wire: Wire, board: StatusBoard | None = None, store: StoreRanks | None = None) -> None:
        self._wire, self._board, self._store = wire, board, store

    def dead(self) -> list[int]:
        self._wire.advance()
        if self._board is not None:
            self._board.publish_lasting_state()
        if self._store is not None and 0 in self._wire.lost:
            self._store.gone = True
        return self._wire.lost


_joined: TcpPeer | None = None


def join(rendezvous: Rendezvous) -> TcpPeer:
    """Return this process's endpoint in its job, the same object each time; collective the first time.

    From then on an uncaught exception, `sys.exit` or Ctrl-C on one rank ends the whole job (see `endings`).

    Raises:
        UserError: the store cannot be reached, or no port is free.
        ExchangeTimeoutError: other ranks did not join in time; names them.
    """
    global _joined
    if _joined is None:
        _joined = _open_world(rendezvous)
        if _joined.size > 1:
            Endings(_joined).install()
    return _joined


def _open_world(rendezvous: Rendezvous) -> TcpPeer:
    """Connect this rank with all others.

    Raises:
        TransportError: the store was lost before all ranks had joined.
    """
    note_rank()
    rank, size = rendezvous.rank, rendezvous.size
    if size == 1:
        wire = Wire(0, {}, _end)
        return TcpPeer(wire, None, [0], "world", Progress(wire.advance), TcpFailures(wire))
    try:
        store = join_attempt(open_store(rendezvous), rendezvous)
        wire = Wire(rank, connect_all(store, rendezvous), _end)
    except DistError as error:
        raise TransportError(
            f"rank {rank} of {size} lost the store at {rendezvous.host} port {rendezvous.port}, where the ranks "
            "meet: rank 0, which runs it, has ended, or the network is interrupted. See rank 0's output"
        ) from error
    if ORDERED:
        board = JobBoard(rank, size, store.gather, store, room_bytes)
        wire.share(board.ranks, board.rooms)
    else:
        board = JobBoard(rank, size, store.gather, store)
    failures = TcpFailures(wire, board, store)  # which keep the store open, if this rank runs it
    return TcpPeer(wire, board, range(size), "world", Progress(wire.advance), failures)


def _end(code: int) -> NoReturn:
    """End this process, as another rank ends the job and has reported the cause."""
    sys.stdout.flush()
    sys.stderr.flush()
    if multiprocessing.parent_process() is not None:
        time.sleep(_PARENT_S)  # it quotes the rank that ends first
    os._exit(code)
