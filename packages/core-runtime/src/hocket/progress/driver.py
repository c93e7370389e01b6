"""What carries a rank's executions forward, whichever thread that is."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hocket.errors import TransportError
from hocket.progress.attended import Attended
from hocket.progress.backoff import pause_s
from hocket.schedule.schedule import Schedule
from hocket.transport.peer import Peer
from hocket.transport.signals import Event

__all__ = ["Advancing", "Driver"]


class Advancing(Protocol):
    """What a driver looks at until it is done."""

    def advance(self) -> bool:
        """Go on as far as possible without waiting, and return whether it is done.

        Raises:
            TransportError: it has failed.
        """


class Driver:
    """A rank's executions and the bell that tells of their messages.

    `step` is called by one thread at a time; the rest may be called by any thread of the rank.

    Attributes:
        peer: the rank's endpoint.
        error: what ended all executions; None while they go on.
        told: set once the application has been told of it.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.error: TransportError | None = None
        self.told = peer.threads.event()
        self._bell = peer.threads.doorbell()
        self._attended: dict[int, Attended] = {}
        self._num_opened = 0
        self._handed_over: deque[Advancing] = deque()
        self._carried: list[Advancing] = []
        self._watchers: list[tuple[Callable[[], bool], Event]] = []
        self._lock = threading.Lock()
        self._in_flight = False
        self._unheard = False
        self._quiet_since_s: float | None = None

    def open(self, schedule: Schedule, peer: Peer, name: str) -> Attended:
        """Make ready for a schedule among the ranks of `peer`; collective among them."""
        attended = Attended(schedule, peer.lane(name), name)
        key, self._num_opened = self._num_opened, self._num_opened + 1
        # Before the others learn how to ring, so that no ring is missed; another thread may look at the one before.
        self._attended = {**self._attended, key: attended}
        self._bell.serve(key, attended.open(self._bell.connect(peer, key)))
        self._note_unheard()
        with self._lock:
            self._note_watched()
        self.ring()
        return attended

    def forget(self, attended: Attended) -> None:
        """Attend to a closed execution no longer."""
        (forgotten,) = [key for key, other in self._attended.items() if other is attended]
        self._attended = {key: other for key, other in self._attended.items() if key != forgotten}
        self._bell.serve(forgotten, None)
        self._note_unheard()

    def carry(self, handed_over: Advancing) -> None:
        """Look at something in every step until it is done."""
        self._handed_over.append(handed_over)
        self.ring()

    def ring(self) -> None:
        """Have the driving thread look at what the application has changed."""
        self._bell.ring()

    def step(self, longest_s: float | None) -> None:
        """Sleep until there is something to do, at most `longest_s`, and do it.

        What a woken thread touches is seldom in a cache: 5 of 6 microseconds of a step are spent on that. So the way
        from the bell to the operations is kept short.

        Raises:
            TransportError: an execution failed.
        """
        everywhere = self._hear(longest_s)
        in_flight = False
        try:
            for attended in self._attended.values():
                if attended.advance(everywhere):
                    self._quiet_since_s = None
                    self._tell()
                in_flight |= attended.in_flight
            in_flight |= self._carry_on()
        except TransportError as error:
            self.fail(error)
            raise
        self._in_flight = in_flight

    def fail(self, error: Exception) -> None:
        """Have all that wait, and all that comes after, end with `error`."""
        if self.error is None:
            if not isinstance(error, TransportError):
                error = TransportError(f"rank {self.peer.rank}: its progress failed: {error!r}")
            self.error = error
            self._tell()

    def check(self) -> None:
        """Raise TransportError in the application if the executions have failed."""
        if self.error is not None:
            self.told.set()
            raise type(self.error)(str(self.error)) from self.error

    def watch(self, over: Callable[[], bool]) -> Event | None:
        """Return an event that is set when `over()` has become true or the driver has failed; None if so already."""
        watcher = (over, self.peer.threads.event())
        with self._lock:
            self._watchers.append(watcher)
            self._note_watched()
        # Rounds are told of from here on; only then is it asked whether this one has ended. Taking the lock keeps the
        # processor to that order, as the fence does where a program ends a round.
        with self._lock:
            if watcher not in self._watchers:
                return None  # told in between
            if not over() and self.error is None:
                return watcher[1]
            self._watchers.remove(watcher)
            self._note_watched()
            return None

    def close(self) -> None:
        """Give the bell back, once nobody steps any more."""
        self._bell.close()

    def _hear(self, longest_s: float | None) -> bool:
        """Sleep, note who rang, and return whether messages must be looked for everywhere."""
        polls = (self._in_flight or self._unheard) and not self._bell.hears_everything
        rings = self._bell.wait(self._pause_s(longest_s) if polls else longest_s)
        if rings:
            self._quiet_since_s = None
        for ring in rings:
            attended = self._attended.get(ring.key)
            if attended is not None:
                attended.rings.append(ring)
        return self._unheard

    def _carry_on(self) -> bool:
        """Look at what was handed over, and return whether anything of it is left."""
        while self._handed_over:
            self._carried.append(self._handed_over.popleft())
        left = [carried for carried in self._carried if not carried.advance()]
        if len(left) < len(self._carried):
            self._carried = left
            self._quiet_since_s = None
            self._tell()
        return bool(left)

    def _pause_s(self, longest_s: float | None) -> float:
        """Return how long to sleep before the next look at what is under way."""
        now_s = self.peer.clock.now()
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        pause = pause_s(now_s - self._quiet_since_s)
        if longest_s is not None:
            return min(pause, longest_s)
        if pause == 0:
            os.sched_yield()
        return pause

    def _note_unheard(self) -> None:
        self._unheard = self._bell.hears_everything or any(a.unheard for a in self._attended.values())

    def _note_watched(self) -> None:
        """Have executions tell of their rounds while somebody waits for one."""
        for attended in self._attended.values():
            attended.tell(bool(self._watchers))

    def _tell(self) -> None:
        with self._lock:
            if not self._watchers:
                return
            over = [(condition() or self.error is not None, event) for condition, event in self._watchers]
            self._watchers = [
                watcher for watcher, (is_over, _) in zip(self._watchers, over, strict=True) if not is_over
            ]
            self._note_watched()
        for is_over, event in over:
            if is_over:
                event.set()
