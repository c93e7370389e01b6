"""What carries a rank's executions forward, whichever thread that is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from hocket.errors import TransportError
from hocket.progress.attended import Attended
from hocket.progress.backoff import HEARTBEAT_S, pause_s
from hocket.schedule.schedule import Schedule
from hocket.transport.peer import Peer
from hocket.transport.signals import Event

__all__ = ["Driver"]


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
        self.told = peer.event()
        self._bell = peer.doorbell()
        self._attended: dict[int, Attended] = {}
        self._num_opened = 0
        self._watchers: list[tuple[Callable[[], bool], Event]] = []
        self._lock = threading.Lock()
        self._moved_s = peer.now()

    def open(self, schedule: Schedule, peer: Peer, name: str) -> Attended:
        """Make ready for a schedule among the ranks of `peer`; collective among them."""
        attended = Attended(schedule, peer.lane(name), name)
        key, self._num_opened = self._num_opened, self._num_opened + 1
        self._attended[key] = attended  # before the others learn how to ring, so that no ring is missed
        attended.open(self._bell.connect(peer, key))
        self.ring()
        return attended

    def forget(self, attended: Attended) -> None:
        """Attend to a closed execution no longer."""
        self._attended = {key: other for key, other in self._attended.items() if other is not attended}

    def ring(self) -> None:
        """Have the driving thread look at what the application has changed."""
        self._bell.ring()

    def step(self, longest_s: float | None) -> None:
        """Sleep until there is something to do, at most `longest_s`, and do it.

        Raises:
            TransportError: an execution failed.
        """
        everywhere = self._hear(longest_s)
        try:
            for attended in list(self._attended.values()):
                if attended.advance(everywhere):
                    self._moved_s = self.peer.now()
                    self._tell()
        except TransportError as error:
            self.error = error
            self._tell()
            raise

    def check(self) -> None:
        """Raise TransportError in the application if the executions have failed."""
        if self.error is not None:
            self.told.set()
            raise TransportError(str(self.error)) from self.error

    def watch(self, over: Callable[[], bool]) -> Event | None:
        """Return an event that is set when `over()` has become true or the driver has failed; None if so already."""
        with self._lock:
            if over() or self.error is not None:
                return None
            event = self.peer.event()
            self._watchers.append((over, event))
            return event

    def close(self) -> None:
        """Give the bell back, once nobody steps any more."""
        self._bell.close()

    def _hear(self, longest_s: float | None) -> bool:
        """Sleep, note who rang, and return whether messages must be looked for everywhere."""
        in_flight, unheard = self._needs_looks()
        if self._bell.hears_everything:
            pause = longest_s
        else:
            quiet_s = self.peer.now() - self._moved_s
            pause = pause_s(quiet_s) if in_flight or unheard else HEARTBEAT_S
            pause = pause if longest_s is None else min(pause, longest_s)
            if pause == 0 and longest_s != 0:
                os.sched_yield()
        rings = self._bell.wait(pause)
        if rings:
            self._moved_s = self.peer.now()
        for ring in rings:
            if ring.key in self._attended:
                self._attended[ring.key].hear(ring)
        # A heartbeat looks everywhere; so does everybody who is not told whose message it is.
        return self._bell.hears_everything or unheard or not (rings or in_flight)

    def _needs_looks(self) -> tuple[bool, bool]:
        """Return whether something is under way, and whether some ranks cannot ring."""
        all_attended = list(self._attended.values())
        return any(a.in_flight for a in all_attended), any(a.unheard for a in all_attended)

    def _tell(self) -> None:
        if not self._watchers:
            return
        with self._lock:
            over = [(condition() or self.error is not None, event) for condition, event in self._watchers]
            self._watchers = [
                watcher for watcher, (is_over, _) in zip(self._watchers, over, strict=True) if not is_over
            ]
        for is_over, event in over:
            if is_over:
                event.set()
