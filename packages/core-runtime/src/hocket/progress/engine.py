"""The progress engine: it advances requests, and activities that other ranks wake, while no rank waits for them."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from hocket.errors import TransportError
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request, T
from hocket.transport.signals import Bells, Event, Wake
from hocket.transport.waiting import back_off_s


class Activity(ABC):
    """An activity of an engine, such as a schedule: it advances when another rank wakes this one, until closed.

    Attributes:
        unheard: whether some ranks cannot wake this one, so that their messages must be polled for; set by `begin`.
    """

    unheard: bool = False

    @abstractmethod
    def begin(self, lane: Lane, connection: Bells) -> None:
        """Begin to exchange messages on `lane` with ranks that `connection` may wake."""

    @abstractmethod
    def note_rung(self, message: int, round: int) -> None:
        """Note a wake-up by another rank; see `Bells.ring`."""

    @abstractmethod
    def advance(self, everywhere: bool) -> bool:
        """Advance as far as possible now; never blocks.

        Args:
            everywhere: whether to look also for messages without a wake-up.

        Returns:
            Whether anything has changed.

        Raises:
            TransportError: a message or a computation failed.
        """

    @property
    @abstractmethod
    def in_flight(self) -> bool:
        """Tell whether an operation is under way whose end wakes no thread."""

    @abstractmethod
    def close(self) -> None:
        """Answer the other ranks until all have closed; collective; does nothing if closed already."""


class ProgressEngine(ABC):
    """An engine that advances requests between start and wait, and the activities of this rank.

    `step` is called by one thread at a time; `open`, `check`, `nudge` and `wait_until` by any thread of the rank.

    Attributes:
        error: the error that ended all activities; None while they run.
    """

    def __init__(self) -> None:
        self.error: TransportError | None = None
        self._looks: list[Callable[[], object]] = []
        self._peer: Peer | None = None
        self._wake: Wake | None = None
        self._activities: dict[int, Activity] = {}
        self._keys = itertools.count()
        self._waiters: list[tuple[Callable[[], bool], Event]] = []
        self._lock = threading.Lock()
        self._in_flight = False
        self._unheard = False
        self._quiet_since_s: float | None = None

    # ------------------------------------------------------------------------------- for the training thread

    def watch(self, look: Callable[[], object]) -> None:
        """Call `look` in each `advance` from now on: it advances requests that are the training thread's in every mode.

        With MPI two threads must not look at one request at once.
        """
        self._looks.append(look)

    def carry(self, request: Request[T], peer: Peer, name: str) -> Request[T]:
        """Advance `request` while the training thread computes, if this engine can; return the request to use.

        Args:
            request: just started; the caller uses the returned one from now on.
            peer: this rank's endpoint.
            name: stands in messages, for instance `gradients.0[3]`.
        """
        return request

    def advance(self) -> None:
        """Look at a few operations under way; called where the training thread can spare microseconds.

        Raises:
            TransportError: an exchange failed.
        """
        for look in self._looks:
            look()

    # ------------------------------------------------------------------------------------------------- activities

    def open(self, activity: Activity, peer: Peer, name: str) -> None:
        """Advance `activity` from now on, and let the other ranks of `peer` wake it; collective among them.

        Args:
            activity: gets a lane of its own.
            peer: this rank's endpoint.
            name: stands in messages, for instance `gradients.0[3]`.
        """
        wake = self._begin(peer)
        lane = peer.lane(name)
        key = next(self._keys)
        # Before the others learn how to ring, so that no ring is missed.
        self._activities = {**self._activities, key: activity}
        activity.begin(lane, wake.connect(peer, key))
        self._note_unheard()
        wake.ring()

    def forget(self, activity: Activity) -> None:
        """Advance a closed activity no longer."""
        self._activities = {key: other for key, other in self._activities.items() if other is not activity}
        self._note_unheard()

    def check(self) -> None:
        """Raise TransportError in the application if an activity has failed."""
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    @abstractmethod
    def nudge(self) -> None:
        """Wake the engine for changes of the application; never blocks."""

    def wait_until(
        self,
        over: Callable[[], bool],
        what: str,
        name: str,
        describe: Callable[[], str],
        timeout_s: float | None,
    ) -> None:
        """Block until `over()` is true, which steps of the engine cause, without burning a core.

        Args:
            over: returns whether the wait has ended.
            what, name: the awaited operation and its exchange, for the other ranks' stall reports.
            describe: returns the awaited event and its source; called for errors and reports only.
            timeout_s: seconds to wait at most; the peer's own `timeout_s` where None.

        Raises:
            ExchangeTimeoutError: not in time; contains the result of `describe`.
            TransportError: an activity failed.
        """
        self.check()
        if over():
            return
        assert self._peer is not None
        self._peer.status.note_waiting(what, name)
        self._wait(over, describe, timeout_s)
        self._peer.status.note_computing()
        self.check()

    def close(self) -> None:
        """Close open activities, in the order of their opening, and stop; collective.

        Raises:
            ExchangeTimeoutError: a rank has not closed in time.
            TransportError: an activity has failed.
        """
        for activity in list(self._activities.values()):
            activity.close()
        self._stop()

    def abandon(self) -> None:
        """Stop without the other ranks, which get no more answers."""
        self._activities = {}
        self._stop()

    # --------------------------------------------------------------------------------------- from the stepping thread

    def step(self, longest_s: float | None) -> None:
        """Sleep until there is work, at most `longest_s` seconds, and do it.

        Raises:
            TransportError: an activity failed.
        """
        assert self._wake is not None
        if self._hear(self._wake, longest_s):
            self._quiet_since_s = None
        everywhere = self._wake.hears_everything or self._unheard
        in_flight = False
        try:
            for activity in self._activities.values():
                if activity.advance(everywhere):
                    self._tell()
                in_flight |= activity.in_flight
            in_flight |= self._advance_carried()
        except TransportError as error:
            self.fail(error)
            raise
        self._in_flight = in_flight

    def fail(self, error: Exception) -> None:
        """End all current and later waits with `error`."""
        if self.error is None:
            if not isinstance(error, TransportError):
                assert self._peer is not None
                error = TransportError(f"rank {self._peer.rank}: the exchanges under way failed: {error!r}")
            self.error = error
            self._tell()

    # -------------------------------------------------------------------------------------------- how it does it

    @abstractmethod
    def _wait(self, over: Callable[[], bool], describe: Callable[[], str], timeout_s: float | None) -> None:
        """Block until `over()` or an activity has failed; see `wait_until`."""

    def _begin(self, peer: Peer) -> Wake:
        """Return the wake-up that steps sleep on; make it for the first activity or carried request."""
        if self._wake is None:
            self._peer = peer
            self._wake = peer.threads.wake()
        return self._wake

    def _stop(self) -> None:
        """Stop carrying out activities; not collective."""
        if self._wake is not None:
            self._wake.close()
        self._wake = self._peer = None

    def _advance_carried(self) -> bool:
        """Look at carried requests, and return whether any is left."""
        return False

    def _hear(self, wake: Wake, longest_s: float | None) -> bool:
        """Sleep, pass wake-ups to activities, and return whether there were any."""
        polls = not wake.hears_everything and (self._in_flight or self._unheard)
        rings = wake.wait(self._pause_s(longest_s) if polls else longest_s)
        for ring in rings:
            activity = self._activities.get(ring.key)
            if activity is not None:
                activity.note_rung(ring.message, ring.round)
        return bool(rings)

    def _note_unheard(self) -> None:
        self._unheard = any(activity.unheard for activity in self._activities.values())

    def _pause_s(self, longest_s: float | None) -> float:
        """Return the sleep before the next look at operations under way, in seconds."""
        assert self._peer is not None
        now_s = self._peer.clock.now()
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        pause_s = back_off_s(now_s - self._quiet_since_s)
        return pause_s if longest_s is None else min(pause_s, longest_s)

    def _event_of(self, over: Callable[[], bool]) -> Event | None:
        """Return an event that is set once `over()` or an activity has failed; None if so already."""
        assert self._peer is not None
        with self._lock:
            if over() or self.error is not None:
                return None
            event = self._peer.threads.event()
            self._waiters.append((over, event))
            return event

    def _tell(self) -> None:
        """Release the waits that have ended; called after each change."""
        self._quiet_since_s = None
        with self._lock:
            ended = [event for over, event in self._waiters if self.error is not None or over()]
            self._waiters = [waiter for waiter in self._waiters if waiter[1] not in ended]
        for event in ended:
            event.set()
