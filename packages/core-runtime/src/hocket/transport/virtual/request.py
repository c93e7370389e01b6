"""The access of a rank to the simulation, and its tasks' operations, events and wake-ups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import DeadlockError, ExchangeTimeoutError, SessionLeftError, TransportError
from hocket.transport.gathering import Ranks
from hocket.transport.network import NetworkModel
from hocket.transport.request import Request
from hocket.transport.signals import Bell, Bells, Event, Wake
from hocket.transport.status import HEARD_AFTER_S
from hocket.transport.virtual.fabric import Fabric
from hocket.transport.virtual.scheduler import Scheduler
from hocket.transport.virtual.timeline import ScheduledThread, Signal

_TRAINING = "main"


class Attendance:
    """The presence of ranks in a session: their training threads wait for each other until a rank leaves.

    Attributes:
        left: the rank that has left, and the reason; empty while none has, or others cannot know.
    """

    def __init__(self) -> None:
        self.left = ""
        self._waiting: list[ScheduledThread] = []

    def leave(self, scheduler: Scheduler, why: str) -> None:
        """Notify the other ranks, a little later, that a rank has left."""
        timeline = scheduler.timeline

        def notify() -> None:
            self.left = self.left or why
            for task in self._waiting:
                if task.is_blocked:
                    task.error = self.error(task)
                    timeline.make_ready(task, timeline.now_s)

        timeline.call_at(timeline.now_s + HEARD_AFTER_S, notify)

    def error(self, task: ScheduledThread) -> SessionLeftError:
        """Return the error of a task that waits."""
        return SessionLeftError(f"{task} waits in the session, but {self.left}")

    @contextmanager
    def waiting(self, task: ScheduledThread) -> Iterator[None]:
        """Return a context for a task's wait, which fails once a rank has left."""
        if task.name != _TRAINING:
            yield  # the engine's own thread: it ends when the training thread says so
            return
        if self.left:
            raise self.error(task)
        self._waiting.append(task)
        try:
            yield
        finally:
            self._waiting.remove(task)


@dataclass(frozen=True)
class Station:
    """The attachment of a rank to the simulation.

    Attributes:
        scheduler: runs its tasks.
        fabric: carries its messages.
        network: their costs.
        rank: its rank in the world, which all messages to a reader use.
        wakes: rung whenever an operation of the rank ends.
        attendance: of its session; None outside of any.
    """

    scheduler: Scheduler
    fabric: Fabric
    network: NetworkModel
    rank: int
    wakes: list[VirtualWake] = field(default_factory=list)
    attendance: Attendance | None = None

    def wait(
        self, signal: Signal, describe: Callable[[], str], default_timeout_s: float, timeout_s: float | None
    ) -> None:
        """Wait as `Scheduler.wait` does; fail if a rank leaves the session."""
        if self.attendance is None or signal.is_set:
            self.scheduler.wait(self.rank, signal, describe, default_timeout_s, timeout_s)
            return
        with self.attendance.waiting(self.scheduler.running(self.rank)):
            self.scheduler.wait(self.rank, signal, describe, default_timeout_s, timeout_s)


class VirtualRequest(Request[Any]):
    """A request that the simulation finishes at a moment of virtual time.

    `done` charges `poll_s`; `wait` jumps to the moment at which the operation finishes.
    """

    def __init__(
        self,
        station: Station,
        timeout_s: float,
        describe: Callable[[], str],
        withdraw: Callable[[], None] | None = None,
    ) -> None:
        """Make the request of an operation that has not finished.

        Args:
            station: of the rank that it belongs to.
            timeout_s: default timeout of waits, in virtual seconds.
            describe: returns the awaited event and its source.
            withdraw: takes a receive out of its mailbox.
        """
        self._station = station
        self._timeout_s = timeout_s
        self._describe = describe
        self._withdraw = withdraw
        self._signal = Signal()
        self._error: str | None = None
        self._result: Any = None

    def done(self) -> bool:
        station = self._station
        station.scheduler.poll(station.rank, station.network.poll_s, self._describe)
        self._raise_if_failed()
        return self._signal.is_set

    def wait(self, timeout_s: float | None = None) -> Any:
        self._station.wait(self._signal, self._describe, self._timeout_s, timeout_s)
        self._raise_if_failed()
        return self._result

    @property
    def result(self) -> Any:
        return self._result

    def withdraw(self) -> None:
        if self._withdraw is None:
            super().withdraw()
        elif not self._signal.is_set:
            self._withdraw()

    def finish(self, result: Any = None) -> None:
        """Note that the operation has finished with `result`; called by the simulation."""
        self._result = result
        self._end()

    def fail(self, message: str) -> None:
        """Note that the operation has failed: `done` and `wait` raise TransportError with `message`."""
        self._error = message
        self._end()

    def _end(self) -> None:
        self._station.scheduler.timeline.fire(self._signal)
        for wake in self._station.wakes:
            wake.ring()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise TransportError(self._error)


class VirtualEvent(Event):
    """An event between tasks of one rank."""

    def __init__(self, station: Station, timeout_s: float) -> None:
        """Make an event whose waits have the default timeout `timeout_s`, in virtual seconds."""
        self._station = station
        self._timeout_s = timeout_s
        self._signal = Signal()

    def set(self) -> None:
        if not self._signal.is_set:
            self._station.scheduler.timeline.fire(self._signal)

    def wait(self, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        self._station.wait(self._signal, describe, self._timeout_s, timeout_s)


class VirtualWake(Wake):
    """A wake-up by the simulation itself, whenever an operation of the rank ends."""

    hears_everything = True

    def __init__(self, station: Station) -> None:
        self._station = station
        self._signal = Signal()
        station.wakes.append(self)

    def connect(self, peer: Ranks, key: int) -> Bells:
        return Bells()  # messages wake their receiver when they arrive

    def ring(self) -> None:
        if not self._signal.is_set:
            self._station.scheduler.timeline.fire(self._signal)

    def wait(self, timeout_s: float | None) -> Sequence[Bell]:
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
