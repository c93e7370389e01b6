"""Lanes over MPI: a communicator each, and for large collectives between ranks of one host their shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hocket.errors import TransportError
from hocket.transport.gathering import check_gathering
from hocket.transport.host import HostCollectives, HostMixer
from hocket.transport.mpi.ordered import CallOrder, GatherRequest, OrderedRequest
from hocket.transport.mpi.request import HostRequest, MPIRequest, Receive, begun
from hocket.transport.peer import Array, Lane, Mixer, Request, Terms, is_same_memory

if TYPE_CHECKING:
    from hocket.transport.mpi.peer import MPIPeer

__all__ = ["MPILane"]

# What an offset may be in MPI's calls, where the library has those of MPI-3 only.
_LARGEST_OFFSET = 2**31 - 1


class MPILane(Lane):
    """A communicator of its own.

    Args:
        host: for collectives over shared memory; None where messages are all there is.
    """

    def __init__(self, peer: MPIPeer, comm: Any, name: str, host: HostCollectives | None = None) -> None:
        self.peer = peer
        self._host = host
        self.name = name
        self.rank, self.size = peer.rank, peer.size
        self.order = CallOrder()
        #: Seconds that the last wait took that was not over soon.
        self.last_wait_s = 0.0
        self._comm = comm
        self._tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1

    def isend(self, data: Array, to: int, round: int) -> Request:
        what = f"send to rank {self.peer.world_rank_of(to)}, round {round}"
        request = begun(
            self, what, lambda: self._comm.Isend([_bytes(data), MPI.BYTE], to, round % self._tags)
        )
        return MPIRequest(self, request, what, data, other=to)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        what = f"receive from rank {self.peer.world_rank_of(source)}, round {round}"
        request = begun(
            self, what, lambda: self._comm.Irecv([_bytes(data), MPI.BYTE], source, round % self._tags)
        )
        return Receive(self, request, what, data, other=source)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        exchange = None if self._host is None else self._host.allreduce(send, receive)
        if exchange is not None:
            return HostRequest(self, exchange, "allreduce")
        given: Any = MPI.IN_PLACE if is_same_memory(send, receive) else send
        return self._in_order(
            lambda: self._comm.Iallreduce(given, receive, MPI.SUM), "allreduce", send, receive
        )

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        what = f"reduce to rank {self.peer.world_rank_of(root)}"
        buffers = [send] if receive is None else [send, receive]
        in_place = self.rank == root and receive is not None and is_same_memory(send, receive)
        given: Any = MPI.IN_PLACE if in_place else send
        return self._in_order(lambda: self._comm.Ireduce(given, receive, MPI.SUM, root), what, *buffers)

    def ibroadcast(self, data: Array, root: int) -> Request:
        what = f"broadcast from rank {self.peer.world_rank_of(root)}"
        exchange = None if self._host is None else self._host.broadcast(data, root)
        if exchange is not None:
            return HostRequest(self, exchange, what)
        return self._in_order(
            lambda: self._comm.Ibcast([_bytes(data), MPI.BYTE], root), what, data, other=root
        )

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        held = None if self._host is None else self._host.mixer(places)
        return None if held is None else _Mixer(self, held)

    def iallgather(self, send: Array, receive: Array) -> Request:
        where = f"rank {self.peer.world_rank}: {self.name}"
        check_gathering(where, send, receive, self.size)
        if receive.nbytes > _LARGEST_OFFSET:
            raise TransportError(
                f"{where}: iallgather: receive has {receive.nbytes} bytes, and MPI counts to {_LARGEST_OFFSET}: "
                "use smaller segments"
            )
        return GatherRequest(self, self._comm, send, receive)

    def ibarrier(self) -> Request:
        return self._in_order(self._comm.Ibarrier, "barrier")

    def close(self) -> None:
        self.ibarrier().wait()
        self._comm.Free()

    def _in_order(
        self, begin: Callable[[], Any], what: str, *buffers: Array, other: int | None = None
    ) -> Request:
        """Call a native collective, now or when those asked for before have been called."""
        if self.order.busy:
            return OrderedRequest(self, begin, what, *buffers, other=other)
        return MPIRequest(self, begun(self, what, begin), what, *buffers, other=other)


class _Mixer(Mixer):
    def __init__(self, lane: MPILane, held: HostMixer) -> None:
        self._lane = lane
        self._held = held

    def start(self, terms: Sequence[Terms]) -> Request:
        return HostRequest(self._lane, self._held.start(terms), "mixing")


def _bytes(data: Array) -> Array:
    return data.reshape(-1).view(np.uint8)
