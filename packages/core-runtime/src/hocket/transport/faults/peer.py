"""A peer whose lanes have faults, and which may die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hocket.transport.faults.config import FaultPlan
from hocket.transport.faults.lane import FaultyLane
from hocket.transport.faults.victim import Victim
from hocket.transport.gathering import Ranks
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request, T
from hocket.transport.signals import Bell, Bells, Event, Wake
from hocket.transport.status import Status
from hocket.transport.threads import Threads
from hocket.transport.wrapper import WrapperPeer


@dataclass(frozen=True)
class Faults(FaultPlan):
    __doc__ = FaultPlan.__doc__

    def wrap(self, peer: Peer) -> Peer:
        """Return `peer`, the world's, with these faults."""
        return FaultyPeer(peer, Victim(peer, self), range(peer.size))


class FaultyPeer(WrapperPeer):
    """A peer with faults; `Faults.wrap` makes the world's.

    Args:
        held: the peer without faults.
        victim: this rank.
        ranks: the peer's, as ranks of the world.
    """

    def __init__(self, held: Peer, victim: Victim, ranks: Sequence[int]) -> None:
        super().__init__(held)
        self._victim = victim
        self._ranks = ranks
        self.status = _Status(held.status, victim)
        self.threads = _Threads(held.threads)

    def _wrap_lane(self, held: Lane, capacity_bytes: int) -> Lane:
        return FaultyLane(held, self, self._victim, self._ranks)

    def _wrap_group(self, held: Peer, ranks: Sequence[int]) -> Peer:
        return FaultyPeer(held, self._victim, [self._ranks[rank] for rank in ranks])

    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        self._victim.use()
        return super().lane(name, capacity_bytes)

    def group(self, ranks: Sequence[int]) -> Peer | None:
        self._victim.use()
        return super().group(ranks)

    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        self._victim.use()
        return super().allgather_bytes(data, timeout_s, what)

    def close(self) -> None:
        self._victim.clock.drain()
        super().close()


class _Status(Status):
    """The held peer's status, which also counts the victim's steps."""

    def __init__(self, held: Status, victim: Victim) -> None:
        self._held, self._victim = held, victim

    def note_waiting(self, what: str, lane: str) -> None:
        self._held.note_waiting(what, lane)

    def note_computing(self, what: str = "") -> None:
        self._held.note_computing(what)

    def note_step(self, step: int) -> None:
        self._victim.steps = step
        self._held.note_step(step)

    def describe(self) -> str:
        return self._held.describe()

    def ask_to_end(self) -> None:
        self._held.ask_to_end()

    def is_asked_to_end(self) -> bool:
        return self._held.is_asked_to_end()

    def check_lost(self) -> None:
        self._held.check_lost()


class _Threads(Threads):
    """The held peer's threads, without wake-ups by other ranks."""

    def __init__(self, held: Threads) -> None:
        self._held = held
        self.shares_process = held.shares_process

    def spawn(self, name: str, call: Callable[[], T], stop: Callable[[], None] | None = None) -> Request[T]:
        return self._held.spawn(name, call, stop)

    def event(self) -> Event:
        return self._held.event()

    def wake(self) -> Wake:
        return _FaultyWake(self._held.wake())

    def check_ended(self) -> None:
        self._held.check_ended()


class _FaultyWake(Wake):
    """A wake-up that other ranks cannot ring, as their rings would bypass the lanes' faults."""

    def __init__(self, held: Wake) -> None:
        self.hears_everything = held.hears_everything
        self._held = held

    def connect(self, peer: Ranks, key: int) -> Bells:
        return Bells()

    def ring(self) -> None:
        self._held.ring()

    def wait(self, timeout_s: float | None) -> Sequence[Bell]:
        return self._held.wait(timeout_s)

    def close(self) -> None:
        self._held.close()
