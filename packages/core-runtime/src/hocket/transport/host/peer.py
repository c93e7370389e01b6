"""Peers, lanes and operations of ranks that are processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from hocket.transport.forks import check_no_fork
from hocket.transport.host.memory import HostMemory
from hocket.transport.host.status import Failures, HostStatus, StatusBoard
from hocket.transport.lane import Lane
from hocket.transport.peer import Memory, Peer
from hocket.transport.progress import Progress
from hocket.transport.request import Request
from hocket.transport.status import WaitSite
from hocket.transport.waiting import WaitsInARow, back_off_s, poll_briefly, wait

__all__ = ["HostPeer", "Operation", "ProcessLane"]


class HostPeer(Peer):
    """The endpoint of a rank that is a process.

    Args:
        rank: this rank in the group.
        world_ranks: the group's ranks in the job.
        board: what the ranks of this host are doing; None in a job of one rank.
        progress: the process's unfinished operations, one for the world and all of its groups.
        failures: the dead among the job's ranks, one for the world and all of its groups.

    Attributes:
        waits: how long this rank's waits have been.
    """

    status: HostStatus

    def __init__(
        self,
        rank: int,
        world_ranks: Sequence[int],
        board: StatusBoard | None,
        progress: Progress,
        failures: Failures,
    ) -> None:
        super().__init__(rank, len(world_ranks))
        self._world_ranks = list(world_ranks)
        self.progress = progress
        self.waits = WaitsInARow()
        self.status = HostStatus(self.world_rank, self._world_ranks, board, failures)
        self.memory = Memory()
        self.shares_network = self.status.spans_hosts
        if self.size > 1 and not self.shares_network:
            self.memory = HostMemory(self, self._world_ranks)

    @property
    def world_rank(self) -> int:
        """This rank in the whole job."""
        return self._world_ranks[self.rank]

    def world_rank_of(self, rank: int) -> int:
        """Translate a rank of this group into the job's."""
        return self._world_ranks[rank]


class ProcessLane(Lane):
    """A lane of ranks that are processes.

    Args:
        peer: whose lane it is.
        name: stands in messages.

    Attributes:
        last_wait_s: seconds that the last wait took that was not over soon.
    """

    def __init__(self, peer: HostPeer, name: str) -> None:
        self.peer = peer
        self.name = name
        self.rank, self.size = peer.rank, peer.size
        self.last_wait_s = 0.0


class Operation(Request):
    """An operation on a lane, and how it is waited for.

    Args:
        lane: where it takes place.
        what: the operation, for messages.
        other: the rank at the other end of a message, or that broadcasts; None where all wait for all.
    """

    __slots__ = ("_lane", "_other", "_what")

    _yields: ClassVar[bool] = False

    def __init__(self, lane: ProcessLane, what: str, other: int | None = None) -> None:
        check_no_fork()
        self._lane = lane
        self._what = what
        self._other = other

    def wait(self, timeout_s: float | None = None) -> Any:
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

        took_s = wait(self._look_around, timeout_s, self._describe_stall, sleep)
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
        self._lane.peer.progress.advance()
        return self.done()

    def _look_around(self) -> bool:
        """Do the same, and look whether all ranks still live: over shared memory nothing fails."""
        self._lane.peer.status.failures.check(self._describe)
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
        site = WaitSite(self._lane.name, self._what, ranks, together=self._other is None)
        return peer.status.describe_stall(site, outcome)
