"""Virtual ranks with lanes of devices, which note the operations that all ranks have to begin in one order."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.arrays import Array, Buffer
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request
from hocket.transport.wrapper import WrapperLane, WrapperPeer

__all__ = ["Begun", "OrderedHost", "in_one_order"]

#: The operations that each rank has begun on its device, in order: the ranks of each, and its name and lane.
Begun = dict[int, list[tuple[tuple[int, ...], str]]]


class _OrderedLane(WrapperLane):
    """A lane that notes its operations, and refuses those that lanes on devices do not have."""

    def __init__(self, held: Lane, begun: list[tuple[tuple[int, ...], str]], ranks: tuple[int, ...]) -> None:
        super().__init__(held)
        self._begun, self._ranks = begun, ranks

    def _begin(self, what: str) -> None:
        self._begun.append((self._ranks, f"{what} of {self.name}"))

    def iallreduce(self, send: Array, receive: Array) -> Request:
        self._begin("allreduce")
        return super().iallreduce(send, receive)

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        self._begin("reduce")
        return super().ireduce(send, receive, root)

    def ibroadcast(self, data: Array, root: int) -> Request:
        self._begin("broadcast")
        return super().ibroadcast(data, root)

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        self._begin("exchange")
        return super().iexchange(sends, receives, round)

    def iallgather(self, *args: object) -> Request[list[Array]]:
        raise AssertionError(
            "iallgather: lanes on devices have no operation with messages of different lengths"
        )

    def isend(self, *args: object) -> Request:
        raise AssertionError("isend: lanes on devices have no single messages")

    def irecv(self, *args: object) -> Request:
        raise AssertionError("irecv: lanes on devices have no single messages")


class _OrderedPeer(WrapperPeer):
    """A peer of virtual ranks with ordered lanes, whether or not it says so."""

    def __init__(self, host: OrderedHost, *, says_so: bool) -> None:
        super().__init__(host.held)
        self.ordered = says_so
        self._host = host

    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> Lane:
        return _OrderedLane(held, self._host.begun, self._host.ranks)

    def allgather_bytes(self, *args: object) -> list[bytes]:
        raise AssertionError("allgather_bytes of a device's peer: control messages go over the host's")


class OrderedHost(WrapperPeer):
    """Virtual ranks whose devices have ordered lanes.

    Args:
        held: this rank's endpoint.
        begun: takes, by rank, notes of the operations that the rank begins.
        says_so: whether its lanes say that all ranks have to begin operations in one order.
    """

    def __init__(self, held: Peer, begun: Begun, *, says_so: bool = True) -> None:
        super().__init__(held)
        self.begun = begun.setdefault(held.rank, [])
        self.ranks = tuple(range(held.size))
        self._says_so = says_so

    def _wrap_group(self, held: Peer, ranks: Sequence[int]) -> Peer:
        group = OrderedHost(held, {held.rank: self.begun}, says_so=self._says_so)
        group.ranks = tuple(self.ranks[rank] for rank in ranks)
        return group

    def on_device(self, device: str) -> Peer:
        return _OrderedPeer(self, says_so=self._says_so)


def in_one_order(begun: Begun) -> bool:
    """Return whether any two ranks begin the operations in which both take part in one order."""

    def common(rank: int, other: int) -> list[tuple[tuple[int, ...], str]]:
        return [each for each in begun[rank] if {rank, other} <= set(each[0])]

    return all(common(rank, other) == common(other, rank) for rank in begun for other in begun)
