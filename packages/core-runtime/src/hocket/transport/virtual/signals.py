"""Events and wake-ups of virtual ranks: signals of the simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hocket.errors import DeadlockError, ExchangeTimeoutError
from hocket.transport.signals import Connection, Event, Ring, Wake
from hocket.transport.virtual.task import Signal

if TYPE_CHECKING:
    from hocket.transport.peer import Peer
    from hocket.transport.virtual.request import Station

__all__ = ["VirtualEvent", "VirtualWake"]


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


class VirtualWake(Wake):
    """A wake-up by the simulation itself, whenever an operation of the rank ends."""

    hears_everything = True

    def __init__(self, station: Station) -> None:
        self._station = station
        self._signal = Signal()
        station.wakes.append(self)

    def connect(self, peer: Peer, key: int) -> Connection:
        return Connection()  # messages wake their receiver when they arrive

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
        self._station.wakes.remove(self)
