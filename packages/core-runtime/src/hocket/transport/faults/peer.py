"""A peer whose lanes have faults, and which may die."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.transport.faults.doorbell import FaultyDoorbell
from hocket.transport.faults.lane import FaultyLane
from hocket.transport.faults.victim import Victim
from hocket.transport.peer import Lane, Peer
from hocket.transport.signals import Doorbell
from hocket.transport.wrapper import WrapperPeer

__all__ = ["FaultyPeer"]


class FaultyPeer(WrapperPeer):
    """A peer with faults; `Faults.wrap` makes the world's.

    Args:
        held: the peer without.
        victim: this rank.
        ranks: the peer's, as ranks of the world.
    """

    def __init__(self, held: Peer, victim: Victim, ranks: Sequence[int]) -> None:
        super().__init__(held)
        self._victim = victim
        self._ranks = ranks

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

    def doorbell(self) -> Doorbell:
        return FaultyDoorbell(super().doorbell())

    def report_progress(self, step: int) -> None:
        self._victim.steps = step
        super().report_progress(step)

    def close(self) -> None:
        self._victim.clock.drain()
        super().close()
