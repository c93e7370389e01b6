"""Lanes over MPI: a communicator each, and shared memory for large collectives within one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from hocket.arrays import Array, as_bytes, is_same_memory
from hocket.errors import TransportError
from hocket.transport.gathering import check_gathering, gathered
from hocket.transport.host import HostPeer, ProcessLane, open_host_collectives
from hocket.transport.lane import Mixer
from hocket.transport.mpi.pieces import cut, cut_message, fits, together
from hocket.transport.mpi.request import CallOrder, MPIRequest
from hocket.transport.request import Request

__all__ = ["MPILane", "gather_rows"]


class MPILane(ProcessLane):
    """A lane with a communicator of its own.

    Args:
        capacity_bytes: as for `Peer.lane`; large collectives use shared memory where all ranks have one host.

    Attributes:
        order: the operations that have native calls left to make.
    """

    def __init__(self, peer: HostPeer, comm: MPI.Comm, name: str, capacity_bytes: int = 0) -> None:
        super().__init__(peer, name)
        self.order = CallOrder()
        self._comm = comm
        self._host = open_host_collectives(self, capacity_bytes)
        self._tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1

    def isend(self, data: Array, to: int, round: int) -> Request:
        tag = round % self._tags

        def send(what: str, piece: Array) -> MPIRequest:
            begin = partial(self._comm.Isend, [piece, MPI.BYTE], to, tag)
            return MPIRequest(self, what, begin, piece, other=to)

        return self._message(send, f"send to rank {self.peer.world_ranks[to]}, round {round}", data)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        tag = round % self._tags

        def receive(what: str, piece: Array) -> MPIRequest:
            begin = partial(self._comm.Irecv, [piece, MPI.BYTE], source, tag)
            return MPIRequest(self, what, begin, piece, other=source, receives=True)

        return self._message(
            receive, f"receive from rank {self.peer.world_ranks[source]}, round {round}", data
        )

    def iallreduce(self, send: Array, receive: Array) -> Request:
        shared = None if self._host is None else self._host.allreduce(send, receive)
        if shared is not None:
            return shared
        in_place = is_same_memory(send, receive)

        def begin(given: Array, got: Array) -> MPI.Request:
            return self._comm.Iallreduce(MPI.IN_PLACE if in_place else given, got, MPI.SUM)

        return self._in_order(begin, "allreduce", send, receive)

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        return None if self._host is None else self._host.mixer(places)

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        what = f"reduce to rank {self.peer.world_ranks[root]}"
        if self.rank != root or receive is None:
            return self._in_order(lambda given: self._comm.Ireduce(given, None, MPI.SUM, root), what, send)
        in_place = is_same_memory(send, receive)

        def begin(given: Array, got: Array) -> MPI.Request:
            return self._comm.Ireduce(MPI.IN_PLACE if in_place else given, got, MPI.SUM, root)

        return self._in_order(begin, what, send, receive)

    def ibroadcast(self, data: Array, root: int) -> Request:
        shared = None if self._host is None else self._host.broadcast(data, root)
        if shared is not None:
            return shared
        what = f"broadcast from rank {self.peer.world_ranks[root]}"

        def begin(piece: Array) -> MPI.Request:
            return self._comm.Ibcast([piece, MPI.BYTE], root)

        return self._in_order(begin, what, as_bytes(data), other=root)

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        """Gather the messages' lengths, and then, with one more call, their bytes; see `Lane.iallgather`."""
        check_gathering(f"rank {self.peer.world_rank}: {self.name}", send, receive, self.size)
        own, lengths = np.array([send.size], np.int64), np.empty(self.size, np.int64)
        begin = partial(self._comm.Iallgather, own, lengths)
        begun: list[Request] = []

        def begin_bytes(_: object) -> Request[list[Array]]:
            begun.append(self._gather_bytes(send, receive, lengths.tolist()))
            return begun[0].then(lambda _: gathered(receive, lengths.tolist()))

        gathering: Request[list[Array]] = MPIRequest(
            self, "allgather", begin, own, lengths, order=self.order
        ).then(begin_bytes)

        def are_bytes_sent() -> bool:
            if not begun:
                gathering.done()
            return bool(begun)

        def advance() -> bool:
            self.order.advance()
            return bool(begun)

        self.order.append(are_bytes_sent)
        # Who waits for something else calls for the bytes meanwhile: other ranks may wait for them.
        self.peer.progress.add(advance)
        return gathering

    def _gather_bytes(self, send: Array, receive: Array, lengths: list[int]) -> Request:
        """Gather messages of known lengths; where these are too many bytes for one call, each rank broadcasts its own.

        Args:
            send: uint8 [n], this rank's message.
            receive: uint8 [size, capacity].
            lengths: the messages', by rank.
        """
        capacity = receive.shape[1]
        if max(lengths) > capacity:
            rank = self.peer.world_ranks[lengths.index(max(lengths))]
            raise TransportError(
                f"rank {self.peer.world_rank}: {self.name} (allgather): rank {rank} sends {max(lengths)} bytes, where "
                f"receive has room for {capacity} here: give every rank the same capacity"
            )
        if not fits(receive):
            rows = gathered(receive, lengths)
            rows[self.rank][:] = send
            return gather_rows(self, self._comm, "allgather", rows)
        starts = [rank * capacity for rank in range(self.size)]
        begin = partial(self._comm.Iallgatherv, [send, MPI.BYTE], [receive, lengths, starts, MPI.BYTE])
        return MPIRequest(self, "allgather", begin, send, receive)

    def ibarrier(self) -> Request:
        return self._in_order(self._comm.Ibarrier, "barrier")

    def close(self) -> None:
        self.ibarrier().wait()
        self._comm.Free()
        self._host = None  # which knows this lane: nothing keeps shared memory longer than it is needed

    def _message(self, begin: Callable[[str, Array], Request], what: str, data: Array) -> Request:
        """Send or receive a message, in pieces if it is too long for one."""
        if fits(data):
            return begin(what, as_bytes(data))
        what = f"{what}, {data.nbytes} bytes in pieces"
        return together(begin(what, piece) for piece in cut_message(data))

    def _in_order(
        self, begin: Callable[..., MPI.Request], what: str, *buffers: Array, other: int | None = None
    ) -> Request:
        """Call a native collective over buffers of one length, in pieces if these are too long for one call."""

        def call(*pieces: Array) -> Request:
            return MPIRequest(self, what, partial(begin, *pieces), *pieces, other=other, order=self.order)

        if all(map(fits, buffers)):
            return call(*buffers)
        return together(call(*pieces) for pieces in zip(*map(cut, buffers), strict=True))


def gather_rows(lane: ProcessLane, comm: MPI.Comm, what: str, rows: Sequence[Array]) -> Request:
    """Gather every rank's row on every rank, each by a broadcast.

    Args:
        rows: uint8, by rank, of known lengths; this rank's row holds its message.
    """
    return together(
        MPIRequest(lane, what, partial(comm.Ibcast, [piece, MPI.BYTE], root), piece)
        for root, row in enumerate(rows)
        for piece in cut(row)
    )
