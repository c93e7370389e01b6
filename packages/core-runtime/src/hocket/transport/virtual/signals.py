"""Events and bells of virtual ranks: signals of the simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hocket.errors import DeadlockError, ExchangeTimeoutError
from hocket.transport.signals import Connection, Doorbell, Event, Ring
from hocket.transport.virtual.task import Signal

if TYPE_CHECKING:
    from hocket.transport.peer import Peer
    from hocket.transport.virtual.request import Station

__all__ = ["VirtualDoorbell", "VirtualEvent"]


class VirtualEvent(Event):
    """An event between tasks of one rank."""

    def __init__(self, station: Station, timeout_s: float) -> None:
        """Make an event whose waits last `timeout_s` virtual seconds if they do not say."""
        self._station = station
        self._timeout_s = timeout_s
        self._signal = Signal()

    def set(self) -> None:
        if not self._signal.is_set:
            self._station.scheduler.timeline.fire(self._signal)

    def wait(self, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        station = self._station
        station.scheduler.wait(station.rank, self._signal, describe, self._timeout_s, timeout_s)


class VirtualDoorbell(Doorbell):
    """A bell that the simulation itself rings when an operation of the rank ends."""

    hears_everything = True

    def __init__(self, station: Station) -> None:
        self._station = station
        self._signal = Signal()
        station.bells.append(self)

    def connect(self, peer: Peer, key: int) -> _NoNeed:
        return _NoNeed()

    def ring(self) -> None:
        if not self._signal.is_set:
            self._station.scheduler.timeline.fire(self._signal)

    def wait(self, timeout_s: float | None) -> Sequence[Ring]:
        scheduler, rank = self._station.scheduler, self._station.rank
        if not self._signal.is_set and timeout_s != 0:
            try:
                scheduler.wait(rank, self._signal, lambda: "anything to do", math.inf, timeout_s)
            except DeadlockError:
                raise
            except ExchangeTimeoutError:
                return ()
        if self._signal.is_set:
            self._signal = Signal()
        return ()

    def close(self) -> None:
        self._station.bells.remove(self)


class _NoNeed(Connection):
    """Messages ring by themselves when they arrive."""

    largest_bytes = 0

    def reaches(self, rank: int) -> bool:
        return False

    def hears(self, rank: int) -> bool:
        return False

    def ring(self, rank: int, message: int, round: int, data: bytes | None = None) -> bool:
        return True
