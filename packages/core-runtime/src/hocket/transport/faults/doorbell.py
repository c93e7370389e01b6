"""A bell that no other rank rings: messages that come with rings would pass the lanes, and their faults, by."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.transport.peer import Peer
from hocket.transport.signals import Connection, Doorbell, Ring

__all__ = ["FaultyDoorbell"]


class FaultyDoorbell(Doorbell):
    """A bell that holds a bell, out of the other ranks' reach; who waits for their messages has to poll."""

    def __init__(self, held: Doorbell) -> None:
        self.hears_everything = held.hears_everything
        self._held = held

    def connect(self, peer: Peer, key: int) -> Connection:
        return _Unconnected()

    def ring(self) -> None:
        self._held.ring()

    def wait(self, timeout_s: float | None) -> Sequence[Ring]:
        return self._held.wait(timeout_s)

    def close(self) -> None:
        self._held.close()


class _Unconnected(Connection):
    largest_bytes = 0

    def reaches(self, rank: int) -> bool:
        return False

    def hears(self, rank: int) -> bool:
        return False

    def ring(self, rank: int, message: int, round: int, data: bytes | None = None) -> bool:
        raise AssertionError("nobody is reached")
