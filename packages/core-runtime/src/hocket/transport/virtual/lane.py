"""A lane between virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hocket.arrays import Array, is_same_memory
from hocket.errors import TransportError
from hocket.transport.gathering import check_gathering
from hocket.transport.lane import Lane
from hocket.transport.reduction import tree_sum
from hocket.transport.request import Request
from hocket.transport.virtual.mailbox import Mailbox, flat_bytes
from hocket.transport.virtual.rendezvous import Call, VirtualRendezvous
from hocket.transport.virtual.request import Station, VirtualRequest

_REDUCIBLE = frozenset(map(np.dtype, (np.float32, np.float64, np.int32, np.int64)))


class LaneState:
    """The state that the ranks of a lane share.

    Attributes:
        name: the ranks' name of it.
        ranks: the group, as ranks of the world.
        mailboxes: one per rank of the group.
        rendezvous: matches its collectives.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.mailboxes = [Mailbox(rank, name) for rank in ranks]
        self.rendezvous = VirtualRendezvous(f"lane {name!r}", ranks, uses_links=True)


class VirtualLane(Lane):
    """The end of a lane on one rank."""

    def __init__(self, state: LaneState, station: Station, rank: int, timeout_s: float) -> None:
        """Open the end of the group's `rank`, with the default timeout `timeout_s`, in seconds."""
        self.name = state.name
        self.rank = rank
        self.size = len(state.ranks)
        self._state = state
        self._station = station
        self._timeout_s = timeout_s
        self._closed = False

    def isend(self, data: Array, to: int, round: int) -> Request:
        self._check_usable(to)
        state, source = self._state, self.rank
        message = flat_bytes(data, f"{self} isend").copy()
        receiver = state.ranks[to]
        request = self._request(
            lambda: f"its own link, in isend to rank {receiver}, round {round}, lane {state.name!r}"
        )
        self._station.fabric.carry(
            self._station.rank,
            receiver,
            message.nbytes,
            sent=request.finish,
            delivered=lambda: state.mailboxes[to].deliver(source, round, message),
        )
        return request

    def irecv(self, data: Array, source: int, round: int) -> Request:
        self._check_usable(source)
        buffer = flat_bytes(data, f"{self} irecv")
        self._check_writable(data, "irecv")
        state = self._state
        sender = state.ranks[source]
        request = VirtualRequest(
            self._station,
            self._timeout_s,
            lambda: f"rank {sender} in irecv, round {round}, lane {state.name!r}",
            lambda: state.mailboxes[self.rank].withdraw(source, round, request),
        )
        state.mailboxes[self.rank].post(source, round, buffer, request)
        return request

    def iallreduce(self, send: Array, receive: Array) -> Request:
        self._check_usable(self.rank)
        self._check_reducible(send, receive, "iallreduce")

        def conclude(buffers: list[tuple[Array, Array]]) -> Sequence[None]:
            total = tree_sum([sent for sent, _ in buffers])
            for _, received in buffers:
                received[...] = total
            return [None] * len(buffers)

        what = f"iallreduce of {send.dtype}{list(send.shape)}"
        seconds = self._station.network.allreduce_seconds
        return self._join(Call(what, (send, receive), send.nbytes, seconds, conclude))

    def ibroadcast(self, data: Array, root: int) -> Request:
        self._check_usable(root)
        flat_bytes(data, f"{self} ibroadcast")
        if self.rank != root:
            self._check_writable(data, "ibroadcast")

        def conclude(buffers: list[Array]) -> Sequence[None]:
            for rank, buffer in enumerate(buffers):
                if rank != root:
                    buffer[...] = buffers[root]
            return [None] * len(buffers)

        what = f"ibroadcast of {data.dtype}{list(data.shape)} from rank {self._state.ranks[root]}"
        return self._join(Call(what, data, data.nbytes, self._station.network.broadcast_seconds, conclude))

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        self._check_usable(root)
        flat_bytes(send, f"{self} ireduce")
        if self.rank == root:
            if receive is None:
                raise TransportError(f"{self} ireduce: the root has no buffer to receive into: give it one")
            self._check_reducible(send, receive, "ireduce")

        def conclude(buffers: list[tuple[Array, Array | None]]) -> Sequence[None]:
            received = buffers[root][1]
            assert received is not None
            received[...] = tree_sum([sent for sent, _ in buffers])
            return [None] * len(buffers)

        what = f"ireduce of {send.dtype}{list(send.shape)} to rank {self._state.ranks[root]}"
        seconds = self._station.network.reduce_seconds
        return self._join(Call(what, (send, receive), send.nbytes, seconds, conclude))

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        self._check_usable(self.rank)
        check_gathering(str(self), send, receive, self.size)

        def conclude(sent: list[Array]) -> Sequence[list[Array]]:
            # All ranks read the same: copies of their own would be as many as ranks times ranks.
            messages = [message.copy() for message in sent]
            return [list(messages) for _ in sent]

        what = f"iallgather of at most {receive.shape[1]} bytes"
        seconds = self._station.network.allgatherv_seconds
        return self._join(Call(what, send, send.nbytes, seconds, conclude))

    def ibarrier(self) -> Request:
        self._check_usable(self.rank)
        seconds = self._station.network.allreduce_seconds
        return self._join(Call("ibarrier", None, 0, seconds, lambda nothing: nothing))

    def close(self) -> None:
        """Close this rank's end; receives that are still posted fail."""
        if not self._closed:
            self._closed = True
            self._state.mailboxes[self.rank].close()

    def __str__(self) -> str:
        return f"rank {self._station.rank}: lane {self.name!r}"

    def _request(self, describe: Callable[[], str]) -> VirtualRequest:
        return VirtualRequest(self._station, self._timeout_s, describe)

    def _join(self, call: Call) -> VirtualRequest:
        return self._state.rendezvous.join(self._station, self.rank, self._timeout_s, call)

    def _check_usable(self, other: int) -> None:
        self._station.scheduler.running(self._station.rank)
        if self._closed:
            raise TransportError(f"{self} is closed")
        if not 0 <= other < self.size:
            raise TransportError(f"{self} has {self.size} ranks and no rank {other}")

    def _check_writable(self, data: Array, operation: str) -> None:
        if not data.flags.writeable:
            raise TransportError(f"{self} {operation}: the buffer is read-only: give a writable one")

    def _check_reducible(self, send: Array, receive: Array, operation: str) -> None:
        flat_bytes(send, f"{self} {operation}")
        flat_bytes(receive, f"{self} {operation}")
        self._check_writable(receive, operation)
        if send.dtype not in _REDUCIBLE:
            raise TransportError(f"{self} {operation}: {send.dtype} is not float32, float64, int32 or int64")
        if (send.dtype, send.shape) != (receive.dtype, receive.shape):
            raise TransportError(
                f"{self} {operation}: sends {send.dtype}{list(send.shape)}, but receives "
                f"{receive.dtype}{list(receive.shape)}: give both one dtype and shape"
            )
        if np.may_share_memory(send, receive) and not is_same_memory(send, receive):
            raise TransportError(
                f"{self} {operation}: send and receive overlap in part: give one buffer for both, or two apart"
            )
