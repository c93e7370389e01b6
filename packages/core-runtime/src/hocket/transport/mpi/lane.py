"""Lanes over MPI: a communicator each, and for large collectives between ranks of one host their shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from hocket.arrays import Array, is_same_memory
from hocket.transport.gathering import check_gathering
from hocket.transport.host import HostCollectives, HostPeer
from hocket.transport.mpi.ordered import CallOrder, GatherRequest, OrderedLane, OrderedRequest
from hocket.transport.mpi.pieces import Pieces, as_bytes, cut, cut_message, fits
from hocket.transport.mpi.request import MPIRequest, Receive, begun
from hocket.transport.request import Request

__all__ = ["MPILane"]


class MPILane(OrderedLane):
    """A communicator of its own.

    Args:
        host: for collectives over shared memory; None where messages are all there is.
    """

    def __init__(self, peer: HostPeer, comm: Any, name: str, host: HostCollectives | None = None) -> None:
        super().__init__(peer, name, host)
        self.order = CallOrder()
        self._comm = comm
        self._tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1

    def isend(self, data: Array, to: int, round: int) -> Request:
        what = f"send to rank {self.peer.world_rank_of(to)}, round {round}"
        tag = round % self._tags

        def send(what: str, piece: Array) -> MPIRequest:
            request = begun(self, what, lambda: self._comm.Isend([piece, MPI.BYTE], to, tag))
            return MPIRequest(self, request, what, piece, other=to)

        return self._message(send, what, data, to)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        what = f"receive from rank {self.peer.world_rank_of(source)}, round {round}"
        tag = round % self._tags

        def receive(what: str, piece: Array) -> MPIRequest:
            request = begun(self, what, lambda: self._comm.Irecv([piece, MPI.BYTE], source, tag))
            return Receive(self, request, what, piece, other=source)

        return self._message(receive, what, data, source)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        shared = self.host_allreduce(send, receive)
        if shared is not None:
            return shared
        in_place = is_same_memory(send, receive)

        def begin(given: Array, got: Array) -> Any:
            return self._comm.Iallreduce(MPI.IN_PLACE if in_place else given, got, MPI.SUM)

        return self._in_order(begin, "allreduce", send, receive)

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        what = f"reduce to rank {self.peer.world_rank_of(root)}"
        if self.rank != root or receive is None:
            return self._in_order(lambda given: self._comm.Ireduce(given, None, MPI.SUM, root), what, send)
        in_place = is_same_memory(send, receive)

        def begin(given: Array, got: Array) -> Any:
            return self._comm.Ireduce(MPI.IN_PLACE if in_place else given, got, MPI.SUM, root)

        return self._in_order(begin, what, send, receive)

    def ibroadcast(self, data: Array, root: int) -> Request:
        shared = self.host_broadcast(data, root)
        if shared is not None:
            return shared
        what = f"broadcast from rank {self.peer.world_rank_of(root)}"
        return self._in_order(
            lambda piece: self._comm.Ibcast([piece, MPI.BYTE], root), what, as_bytes(data), other=root
        )

    def iallgather(self, send: Array, receive: Array) -> Request:
        check_gathering(f"rank {self.peer.world_rank}: {self.name}", send, receive, self.size)
        return GatherRequest(self, self._comm, send, receive)

    def ibarrier(self) -> Request:
        return self._in_order(self._comm.Ibarrier, "barrier")

    def close(self) -> None:
        self.ibarrier().wait()
        self._comm.Free()

    def _message(
        self, begin: Callable[[str, Array], MPIRequest], what: str, data: Array, other: int
    ) -> Request:
        """Send or receive a message, in pieces if it is too long for one."""
        if fits(data):
            return begin(what, as_bytes(data))
        what, pieces = f"{what}, {data.nbytes} bytes in pieces", cut_message(data)
        return Pieces(self, what, lambda number: begin(what, pieces[number]), len(pieces), other=other)

    def _in_order(
        self, begin: Callable[..., Any], what: str, *buffers: Array, other: int | None = None
    ) -> Request:
        """Call a native collective over buffers of one length, in pieces if these are too long for one call."""
        if all(map(fits, buffers)):
            return self._call(partial(begin, *buffers), what, *buffers, other=other)
        pieces = [*zip(*map(cut, buffers), strict=True)]
        return Pieces(
            self,
            what,
            lambda number: self._call(partial(begin, *pieces[number]), what, *pieces[number], other=other),
            len(pieces),
            other=other,
        )

    def _call(
        self, begin: Callable[[], Any], what: str, *buffers: Array, other: int | None = None
    ) -> Request:
        """Call a native collective, now or when those asked for before have been called."""
        if self.order.busy:
            return OrderedRequest(self, begin, what, *buffers, other=other)
        return MPIRequest(self, begun(self, what, begin), what, *buffers, other=other)
