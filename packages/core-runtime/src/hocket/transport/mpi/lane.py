"""Lanes over MPI: a communicator each, and for large allreduces between ranks of one host their shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hocket.transport.host import HostLane, shared_views
from hocket.transport.mpi.request import HostRequest, MPIRequest, Receive
from hocket.transport.peer import Array, Lane, Request

if TYPE_CHECKING:
    from hocket.transport.mpi.peer import MPIPeer

__all__ = ["MPILane"]

# A lane remembers where so many arrays lie in shared memory.
_SHARED_REMEMBERED = 64


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
        return Receive(self, request, what, data, other=source)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        if self._host is not None and self._host.suits(send):
            contributions = self._everybodys(send)
            if contributions is not None:
                return HostRequest(self, self._host.start(contributions, receive), "allreduce")
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


def _bytes(data: Array) -> Array:
    return data.reshape(-1).view(np.uint8)
