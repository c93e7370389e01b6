"""Peers, lanes and operations of ranks that are processes."""

from __future__ import annotations

import struct
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.transport.forks import check_no_fork
from hocket.transport.host.memory import HostMemory
from hocket.transport.host.status import Failures, HostStatus, StatusBoard
from hocket.transport.lane import Lane
from hocket.transport.peer import Memory, Peer
from hocket.transport.progress import Progress
from hocket.transport.request import RANKS_DIVERGED, Request
from hocket.transport.status import WaitSite, number_ranks
from hocket.transport.waiting import WaitsInARow, back_off_s, never, poll_briefly, wait

__all__ = ["STUCK_AFTER_S", "HostPeer", "PendingCall", "ProcessLane"]

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
        self._world_ranks = list(world_ranks)
        self.progress = progress
        self.waits = WaitsInARow()
        self.status = HostStatus(self.world_rank, self._world_ranks, board, failures, session)
        self.memory = Memory()
        self.shares_network = self.status.spans_hosts
        if self.size > 1 and not self.shares_network:
            self.memory = HostMemory(self, self._world_ranks)

    @property
    def world_rank(self) -> int:
        """Return this rank's number in the whole job."""
        return self._world_ranks[self.rank]

    def world_rank_of(self, rank: int) -> int:
        """Translate a rank of this group into the job's."""
        return self._world_ranks[rank]

    def begin_session(self) -> int:
        self._num_sessions += 1
        return self._num_sessions

    def session(self, number: int) -> Peer:
        if self.size == 1:
            return self
        peer = self._open_session(number, self._session_key(number))
        peer.timeout_s, peer.shares_network = self.timeout_s, self.shares_network
        if not isinstance(self.memory, HostMemory):
            peer.memory = self.memory
        return peer

    def leave_session(self, number: int, why: str) -> None:
        if self.status.board is not None:
            self.status.board.leave(self._session_key(number), why)

    def _session_key(self, number: int) -> int:
        """Return a key of a session, unique in the job, also of its groups; above 0."""
        return 1 + zlib.crc32(f"{self.status.session} {self._world_ranks} {number}".encode())

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
            purpose: stands in reports; if it differs from `what`, ranks may never make the call.

        Raises:
            TransportError: they make different calls; names the ranks and their calls.
        """
        if self.size == 1:
            return [number]
        own = np.frombuffer(_CALL.pack(number, what.encode()[:56]), np.uint8)
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
        for rank, called in zip(self._world_ranks, calls, strict=True):
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


class PendingCall(Request):
    """An operation on a lane of ranks that are processes, with its wait.

    Args:
        lane: the lane.
        what: the operation, for messages.
        other: the rank at the other end of a message, or the root of a broadcast; None where all wait for all.
    """

    __slots__ = ("_lane", "_other", "_what")

    _yields: ClassVar[bool] = False

    def __init__(self, lane: ProcessLane, what: str, other: int | None = None) -> None:
        check_no_fork()
        self._lane = lane
        self._what = what
        self._other = other

    def wait(self, timeout_s: float | None = None, is_in_vain: Callable[[], bool] = never) -> Any:
        """Block until done; see `Request.wait`.

        Args:
            timeout_s: seconds to wait at most; the peer's own where None.
            is_in_vain: called now and then; returns whether to give up as after the timeout.
        """
        check_no_fork()
        peer = self._lane.peer
        look = self._look if peer.progress.busy else self.done
        if look():
            return self.result
        expected_s = peer.waits.expected_s()
        if not expected_s and self._may_be_brief() and poll_briefly(look, self._yields):
            return self.result
        peer.status.note_waiting(self._what, self._lane.name)
        timeout_s = peer.timeout_s if timeout_s is None else timeout_s

        def sleep(waited_s: float, longest_s: float) -> None:
            self._sleep(min(back_off_s(waited_s, expected_s), longest_s))

        took_s = wait(self._look_around, timeout_s, self._describe_stall, sleep, is_in_vain=is_in_vain)
        peer.waits.ended(took_s)
        self._lane.last_wait_s = took_s
        peer.status.note_computing()
        return self.result

    def _may_be_brief(self) -> bool:
        """Return whether to poll without a pause at first, which may cost other ranks their core."""
        return True

    def _sleep(self, longest_s: float) -> None:
        """Sleep before another look, at most for `longest_s`."""
        time.sleep(longest_s)

    def _look(self) -> bool:
        """Advance all operations that other ranks need, and return whether this one is done."""
        self._lane.peer.progress.advance()
        return self.done()

    def _look_around(self) -> bool:
        """Do the same, and check that all ranks live, as over shared memory no operation fails."""
        self._lane.peer.status.check(self._describe)
        return self._look()

    def _describe(self) -> str:
        return f"rank {self._lane.peer.world_rank}: {self._lane.name} ({self._what})"

    def _awaited(self) -> list[int]:
        """Return the ranks of the lane that this operation waits for, or may wait for."""
        others = [rank for rank in range(self._lane.size) if rank != self._lane.rank]
        return others if self._other is None or self._other == self._lane.rank else [self._other]

    def _describe_stall(self, outcome: str) -> str:
        peer = self._lane.peer
        ranks = [peer.world_rank_of(rank) for rank in self._awaited()]
        site = WaitSite(self._lane.name, self._what, ranks, together=self._other is None)
        return peer.status.describe_stall(site, outcome)
