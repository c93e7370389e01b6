"""A transport that holds a transport: what counts, traces, delays or fails is a subclass of one of these.

Each class passes everything on to the one that it holds, so that a subclass overrides only what it is about. A
subclass of `WrapperPeer` says in `_wrap_lane` and `_wrap_group` what becomes of the lanes and groups that the held
peer opens; where it says nothing, a lane stays as it is and a group is held by the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hocket.transport.peer import Advancing, Array, Lane, Mixer, Peer, Request
from hocket.transport.signals import Doorbell, Event

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
        self.held = held
        self.transport, self.rank, self.size = held.transport, held.rank, held.size
        self.shares_process = held.shares_process

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
    def host_name(self) -> str:
        """The name of the held peer's host."""
        return self.held.host_name

    @property
    def timeout_s(self) -> float:
        """How long waits last that do not say, in seconds: the held peer's."""
        return self.held.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.held.timeout_s = seconds

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        return self._wrap_lane(self.held.lane(name, capacity_bytes), capacity_bytes)

    def group(self, ranks: Sequence[int]) -> Peer | None:
        group = self.held.group(ranks)
        return None if group is None else self._wrap_group(group, ranks)

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        return self.held.allgather_bytes(data, timeout_s, what)

    def now(self) -> float:
        return self.held.now()

    def elapse(self, seconds: float) -> None:
        self.held.elapse(seconds)

    def sleep(self, seconds: float) -> None:
        self.held.sleep(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> bool:
        return self.held.call_later(seconds, call)

    def allocate(self, nbytes: int) -> Array:
        return self.held.allocate(nbytes)

    def works_in_place(self, data: Array) -> bool:
        return self.held.works_in_place(data)

    def owe(self, exchanges: Advancing) -> bool:
        return self.held.owe(exchanges)

    def share(self, nbytes: int) -> Sequence[Array] | None:
        return self.held.share(nbytes)

    def spawn(self, name: str, call: Callable[[], Any], stop: Callable[[], None] | None = None) -> Request:
        return self.held.spawn(name, call, stop)

    def event(self) -> Event:
        return self.held.event()

    def doorbell(self) -> Doorbell:
        return self.held.doorbell()

    def note_waiting(self, what: str, lane: str) -> None:
        self.held.note_waiting(what, lane)

    def note_computing(self) -> None:
        self.held.note_computing()

    def describe_waiting(self) -> str:
        return self.held.describe_waiting()

    def report_progress(self, step: int) -> None:
        self.held.report_progress(step)

    def check_lost(self) -> None:
        self.held.check_lost()

    def kill(self) -> NoReturn:
        self.held.kill()

    def abort(self, message: str, code: int = 1) -> None:
        self.held.abort(message, code)

    def close(self) -> None:
        self.held.close()
