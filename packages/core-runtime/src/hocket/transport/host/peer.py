"""Peers and lanes of ranks that are processes."""

from __future__ import annotations

import struct
import time
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.host.memory import HostMemory
from hocket.transport.host.status import Failures, HostStatus, StatusBoard
from hocket.transport.lane import Lane
from hocket.transport.peer import Memory, Peer
from hocket.transport.pending import PendingCall, Progress
from hocket.transport.request import RANKS_DIVERGED, Request
from hocket.transport.status import number_ranks

#: Ranks that wait elsewhere, so long and while nobody computes, in seconds, do not come.
STUCK_AFTER_S = 5.0

# What a rank is about to do with all others, and a number.
_CALL = struct.Struct("=q56s")


class HostPeer(Peer):
    """The endpoint of a rank that is a process.

    Args:
        rank: this rank in the group.
        world_ranks: the group's ranks in the job.
        board: the status board of this host's ranks; None in a job of one rank.
        progress: the process's unfinished operations, one for the world and all of its groups.
        failures: the dead among the job's ranks, one for the world and all of its groups.
        session: as of `HostStatus`.

    Attributes:
        world_ranks: the group's ranks in the job.
        waits: the length of this rank's last wait.
    """

    status: HostStatus

    def __init__(
        self,
        rank: int,
        world_ranks: Sequence[int],
        board: StatusBoard | None,
        progress: Progress,
        failures: Failures,
        session: int = 0,
    ) -> None:
        super().__init__(rank, len(world_ranks))
        self._num_sessions = 0
        self.world_ranks = list(world_ranks)
        self.progress = progress
        self.status = HostStatus(self.world_rank, self.world_ranks, board, failures, session)
        self.memory = Memory()
        if self.size > 1 and not self.status.spans_hosts:
            self.memory = HostMemory(self, self.world_ranks)

    @property
    def world_rank(self) -> int:
        """Return this rank's number in the whole job."""
        return self.world_ranks[self.rank]

    def begin_session(self) -> int:
        self._num_sessions += 1
        return self._num_sessions

    def session(self, number: int) -> Peer:
        if self.size == 1:
            return self
        peer = self._open_session(number, self._session_key(number))
        peer.timeout_s = self.timeout_s
        if not isinstance(self.memory, HostMemory):
            peer.memory = self.memory
        return peer

    def leave_session(self, number: int, why: str) -> None:
        if self.status.board is not None:
            self.status.board.leave(self._session_key(number), why)

    def _session_key(self, number: int) -> int:
        """Return a key of a session, unique in the job, also of its groups; above 0."""
        return 1 + zlib.crc32(f"{self.status.session} {self.world_ranks} {number}".encode())

    @abstractmethod
    def _open_session(self, number: int, key: int) -> Peer:
        """Return this rank's endpoint in the session with the board's key `key`; collective."""

    @property
    @abstractmethod
    def control(self) -> ProcessLane:
        """Return the lane of control messages."""

    @abstractmethod
    def abort(self, message: str, code: int = 1) -> NoReturn:
        """End the job; see `Peer.abort`. An empty `message` is not printed."""

    @abstractmethod
    def leave(self, where: str) -> Request:
        """Begin to leave the job; done when all of its ranks do.

        Args:
            where: a phrase on this rank at its end, for errors.
        """

    def pause(self, seconds: float) -> None:
        """Sleep at the end of the job, while another rank may end it."""
        time.sleep(seconds)

    @abstractmethod
    def _gather_words(self, own: Array, everyones: Array, what: str) -> PendingCall:
        """Gather every rank's `own` [n] into every rank's `everyones` [size, n], uint8; named `what`.

        The peer has two ranks or more.
        """

    def _agree_on_call(
        self, what: str, number: int = 0, timeout_s: float | None = None, purpose: str = ""
    ) -> list[int]:
        """Check that all ranks make the same call here, and return every rank's `number`.

        Args:
            what: the call.
            number: this rank's, for instance the length of its data, in bytes.
            timeout_s: seconds to wait at most.
            purpose: stands in reports, and in place of `what` as the call's name, up to a colon; if it differs from
                `what`, ranks may never make the call.

        Raises:
            TransportError: they make different calls; names the ranks and their calls.
        """
        if self.size == 1:
            return [number]
        name = (purpose or what).partition(":")[0]
        own = np.frombuffer(_CALL.pack(number, name.encode()[:56]), np.uint8)
        everyones = np.zeros((self.size, own.size), np.uint8)
        gathering = self._gather_words(own, everyones, purpose or what)
        if purpose in ("", what):
            gathering.wait(timeout_s)
        else:
            gathering.wait(timeout_s, is_in_vain=self._is_in_vain)
        calls = [_CALL.unpack(row.tobytes()) for row in everyones]
        if len({called for _, called in calls}) > 1:
            raise TransportError(self._describe_mismatch([called for _, called in calls]))
        return [their_number for their_number, _ in calls]

    def _is_in_vain(self) -> bool:
        return self.status.is_waited_for(self.control.name, STUCK_AFTER_S)

    def _describe_mismatch(self, calls: Sequence[bytes]) -> str:
        ranks: dict[bytes, list[int]] = {}
        for rank, called in zip(self.world_ranks, calls, strict=True):
            ranks.setdefault(called, []).append(rank)
        said = "; ".join(
            f"{number_ranks(who)} at {called.rstrip(bytes(1)).decode(errors='replace')}"
            for called, who in ranks.items()
        )
        return f"rank {self.world_rank}: the ranks are in different places: {said}: {RANKS_DIVERGED}"


class ProcessLane(Lane):
    """A lane of ranks that are processes.

    Args:
        peer: the peer of the lane.
        name: stands in messages.

    Attributes:
        last_wait_s: length of the last wait that was not brief, in seconds.
    """

    def __init__(self, peer: HostPeer, name: str) -> None:
        self.peer = peer
        self.name = name
        self.rank, self.size = peer.rank, peer.size
        self.last_wait_s = 0.0
