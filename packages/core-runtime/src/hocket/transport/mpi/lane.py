"""Lanes over MPI: a communicator each, and shared memory for large collectives within one host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from hocket.arrays import Array, as_bytes, is_same_memory
from hocket.errors import TransportError
from hocket.schedule.builders import ring_allreduce
from hocket.transport.gathering import check_gathering, gathered
from hocket.transport.host import HostPeer, ProcessLane, open_host_collectives
from hocket.transport.lane import Mixer
from hocket.transport.mpi.pieces import cut, cut_message, fits, together
from hocket.transport.mpi.request import CallOrder, MPIRequest
from hocket.transport.mpi.scheduled import ScheduledCall
from hocket.transport.program import Program, program_on
from hocket.transport.request import Request

#: Between hosts an allreduce of so many bytes for each rank is a ring of messages.
RING_SHARE_BYTES = 1 << 16


class MPILane(ProcessLane):
    """A lane with a communicator of its own.

    Args:
        capacity_bytes: as for `Peer.lane`; large collectives use shared memory where all ranks have one host.
        between_hosts: whether its ranks have several hosts; the same on all of them.

    Attributes:
        order: the operations that have native calls left to make.
    """

    def __init__(
        self,
        peer: HostPeer,
        comm: MPI.Comm,
        name: str,
        capacity_bytes: int = 0,
        *,
        between_hosts: bool = False,
    ) -> None:
        super().__init__(peer, name)
        self.order = CallOrder()
        self._comm = comm
        self._host = open_host_collectives(self, capacity_bytes)
        # The lower half for the messages of rounds, the upper one for those of programs.
        self._tags = (int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1) // 2
        self._between_hosts = between_hosts
        self._programs: dict[tuple[object, ...], Program] = {}
        self._calls = itertools.count()

    def isend(self, data: Array, to: int, round: int) -> Request:
        what = f"send to rank {self.peer.world_ranks[to]}, round {round}"
        return self._send(what, data, to, round % self._tags)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        what = f"receive from rank {self.peer.world_ranks[source]}, round {round}"
        return self._receive(what, data, source, round % self._tags)

    def _send_part(self, data: Array, to: int, number: int) -> Request:
        """Send a message of a program, with its number among those of the lane."""
        what = f"allreduce: send to rank {self.peer.world_ranks[to]}"
        return self._send(what, data, to, self._tags + number % self._tags)

    def _receive_part(self, data: Array, source: int, number: int) -> Request:
        """Receive a message of a program, with its number among those of the lane."""
        what = f"allreduce: receive from rank {self.peer.world_ranks[source]}"
        return self._receive(what, data, source, self._tags + number % self._tags)

    def _send(self, what: str, data: Array, to: int, tag: int) -> Request:
        def send(what: str, piece: Array) -> MPIRequest:
            begin = partial(self._comm.Isend, [piece, MPI.BYTE], to, tag)
            return MPIRequest(self, what, begin, piece, other=to)

        return self._message(send, what, data)

    def _receive(self, what: str, data: Array, source: int, tag: int) -> Request:
        def receive(what: str, piece: Array) -> MPIRequest:
            begin = partial(self._comm.Irecv, [piece, MPI.BYTE], source, tag)
            return MPIRequest(self, what, begin, piece, other=source, receives=True)

        return self._message(receive, what, data)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        shared = None if self._host is None else self._host.allreduce(send, receive)
        if shared is not None:
            return shared
        if self._between_hosts and receive.nbytes >= self.size * RING_SHARE_BYTES:
            return self._by_ring(send, receive)
        in_place = is_same_memory(send, receive)

        def begin(given: Array, got: Array) -> MPI.Request:
            return self._comm.Iallreduce(MPI.IN_PLACE if in_place else given, got, MPI.SUM)

        return self._in_order(begin, "allreduce", send, receive)

    def _by_ring(self, send: Array, receive: Array) -> Request:
        if not is_same_memory(send, receive):
            np.copyto(receive, send)
        build = partial(ring_allreduce, self.rank, self.size)
        program = program_on(self._programs, "allreduce", receive, build)
        number = next(self._calls)
        return ScheduledCall(self, "allreduce", program, number, self._send_part, self._receive_part)

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
                f"rank {self.peer.world_rank}: {self.name} (allgather): rank {rank} sends {max(lengths)} bytes, but "
                f"this rank's receive buffer has room for {capacity}: give every rank the same capacity"
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
        self._programs.clear()
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
