"""Peers of ranks that are processes, those of one host over its memory."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.transport.host.collectives import HostCollectives
from hocket.transport.host.exchange import HostLane
from hocket.transport.host.marks import MARK_BYTES, Marks
from hocket.transport.host.memory import SMALLEST_BYTES, HostMemory
from hocket.transport.host.status import Failures, HostStatus, StatusBoard
from hocket.transport.peer import Memory, Peer
from hocket.transport.progress import Progress
from hocket.transport.waiting import WaitsInARow

__all__ = ["HostPeer"]


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

    def host_collectives(self, name: str, capacity_bytes: int) -> HostCollectives | None:
        """Return what a lane does over shared memory; None, on all ranks alike, where messages are the way.

        Args:
            name: the lane's.
            capacity_bytes: as of `lane`.
        """
        if capacity_bytes < SMALLEST_BYTES:
            return None
        marks = self.memory.share(MARK_BYTES)
        if marks is None:
            return None
        return HostCollectives(HostLane(name, self._world_ranks, self.rank, Marks(self.rank, marks)))
