"""A transport around another: the base of transports that count, trace, delay or fail.

Each class passes all calls on to the held object, so that a subclass overrides only its own concern. A subclass of
`WrapperPeer` wraps the held peer's lanes and groups in `_wrap_lane` and `_wrap_group`; by default a lane stays as it is
and a group is wrapped by the same class. The parts of a peer (clock, memory, threads, status) are the held one's,
unless a subclass puts another one in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.arrays import Array, Buffer
from hocket.transport.lane import Lane, Mixer
from hocket.transport.peer import Peer
from hocket.transport.request import Request


class WrapperLane(Lane):
    """A lane around another.

    Attributes:
        held: the inner lane.
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

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        return self.held.iallgather(send, receive)

    def ibroadcast(self, data: Array, root: int) -> Request:
        return self.held.ibroadcast(data, root)

    def ibarrier(self) -> Request:
        return self.held.ibarrier()

    def close(self) -> None:
        self.held.close()


class WrapperPeer(Peer):
    """A peer around another.

    Attributes:
        held: the inner peer.
    """

    def __init__(self, held: Peer) -> None:
        super().__init__(held.rank, held.size)
        self.held = held
        self.transport, self.device, self.ordered = held.transport, held.device, held.ordered
        self.clock, self.memory, self.progress = held.clock, held.memory, held.progress
        self.threads, self.status = held.threads, held.status
        self.announce_leaving = held.announce_leaving

    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> Lane:
        """Return this peer's wrapper of a lane of the held one; called on all ranks alike."""
        return held

    def _wrap_group(self, held: Peer, ranks: Sequence[int]) -> Peer:
        """Return this peer's wrapper of its endpoint in a group; on the members only.

        Args:
            held: the held peer's endpoint in the group.
            ranks: the members, as ranks of this peer, in the group's order.
        """
        return type(self)(held)

    @property
    def timeout_s(self) -> float:
        """Return the default timeout of waits, in seconds: the held peer's."""
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
