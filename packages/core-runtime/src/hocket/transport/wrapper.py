"""A transport that holds a transport: what counts, traces, delays or fails is a subclass of one of these.

Each class passes everything on to the one that it holds, so that a subclass overrides only what it is about. A
subclass of `WrapperPeer` says in `_wrap_lane` and `_wrap_group` what becomes of the lanes and groups that the held
peer opens; where it says nothing, a lane stays as it is and a group is held by the same class. The parts of a peer
(clock, memory, threads, status) are the held one's, unless a subclass puts another one in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.arrays import Array, Buffer
from hocket.transport.lane import Lane, Mixer
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["WrapperLane", "WrapperPeer", "WrapperRequest"]


class WrapperRequest(Request):
    """A request that holds a request.

    Attributes:
        held: the one that it holds.
    """

    __slots__ = ("held",)

    def __init__(self, held: Request) -> None:
        self.held = held

    def done(self) -> bool:
        return self.held.done()

    def wait(self, timeout_s: float | None = None) -> Any:
        return self.held.wait(timeout_s)

    @property
    def result(self) -> Any:
        return self.held.result

    def withdraw(self) -> None:
        self.held.withdraw()


class WrapperLane(Lane):
    """A lane that holds a lane.

    Attributes:
        held: the one that it holds.
    """

    def __init__(self, held: Lane) -> None:
        self.held = held
        self.name, self.rank, self.size = held.name, held.rank, held.size

    def isend(self, data: Array, to: int, round: int) -> Request:
        return self.held.isend(data, to, round)

    def irecv(self, data: Array, source: int, round: int) -> Request:
        return self.held.irecv(data, source, round)

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        return self.held.iexchange(sends, receives, round)

    def iallreduce(self, send: Array, receive: Array) -> Request:
        return self.held.iallreduce(send, receive)

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        return self.held.mixer(places)

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        return self.held.ireduce(send, receive, root)

    def iallgather(self, send: Array, receive: Array) -> Request:
        return self.held.iallgather(send, receive)

    def ibroadcast(self, data: Array, root: int) -> Request:
        return self.held.ibroadcast(data, root)

    def ibarrier(self) -> Request:
        return self.held.ibarrier()

    def close(self) -> None:
        self.held.close()


class WrapperPeer(Peer):
    """A peer that holds a peer.

    Attributes:
        held: the one that it holds.
    """

    def __init__(self, held: Peer) -> None:
        super().__init__(held.rank, held.size)
        self.held = held
        self.transport, self.device, self.ordered = held.transport, held.device, held.ordered
        self.shares_network = held.shares_network
        self.clock, self.memory, self.progress = held.clock, held.memory, held.progress
        self.threads, self.status = held.threads, held.status
        self.tell_left = held.tell_left

    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> Lane:
        """Return what this peer makes of a lane that the held one has opened; called on all ranks alike."""
        return held

    def _wrap_group(self, held: Peer, ranks: Sequence[int]) -> Peer:
        """Return what this peer makes of its endpoint in a group; on the members only.

        Args:
            held: the held peer's endpoint in the group.
            ranks: the members, as ranks of this peer, in the group's order.
        """
        return type(self)(held)

    @property
    def timeout_s(self) -> float:
        """How long waits last that do not say, in seconds: the held peer's."""
        return self.held.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.held.timeout_s = seconds

    def begin_session(self) -> int:
        return self.held.begin_session()

    def session(self, number: int) -> Peer:
        held = self.held.session(number)
        return self if held is self.held else self._wrap_group(held, range(self.size))

    def leave_session(self, number: int, why: str) -> None:
        self.held.leave_session(number, why)

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        return self._wrap_lane(self.held.lane(name, capacity_bytes), capacity_bytes)

    def group(self, ranks: Sequence[int]) -> Peer | None:
        group = self.held.group(ranks)
        return None if group is None else self._wrap_group(group, ranks)

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        return self.held.allgather_bytes(data, timeout_s, what)

    def on_device(self, device: str) -> Peer | None:
        peer = self.held.on_device(device)
        return None if peer is None else self._wrap_group(peer, range(self.size))

    def abort(self, message: str, code: int = 1) -> None:
        self.held.abort(message, code)

    def close(self) -> None:
        self.held.close()
