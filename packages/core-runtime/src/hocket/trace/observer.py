"""Events of a session while it trains: exchanges that start and end, waits, and a step's phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["ExchangeEvent", "ObservedRequest", "Observer", "OverlapClock"]


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One exchange of one segment in one round, on this rank.

    Attributes:
        name: the segment's name, for instance `gradients.0[3]`.
        round: the exchange's own counter, from 0.
        num_bytes: the bytes that this rank sends, as the collective's algorithm counts them.
        start_s: the time of its start, in seconds on the peer's clock.
        end_s: the time at which the training thread knew that it was over; None while it is under way.
    """

    name: str
    round: int
    num_bytes: float
    start_s: float
    end_s: float | None = None


class Observer:
    """A receiver of a session's events, on the training thread; subclasses override methods as they need.

    An observer belongs to one session on one rank. It changes nothing, and raises only to end the training. All
    times are seconds on the clock of the session's peer.
    """

    def join(self, peer: Peer) -> Peer:
        """Return the peer through which the session communicates; collective.

        Args:
            peer: this rank's endpoint.

        Returns:
            `peer`, or a peer that holds it, as a trace's does to record all messages.
        """
        return peer

    def started(self, exchange: ExchangeEvent) -> None:
        """An exchange is about to start."""

    def complete(self, exchange: ExchangeEvent) -> None:
        """An exchange has its result."""

    def failed(self, exchange: ExchangeEvent, error: BaseException) -> None:
        """An exchange could not be started or did not come to its end; `error` is raised next."""

    def waited(self, exchange: ExchangeEvent, start_s: float, end_s: float) -> None:
        """The training thread waited for an exchange under way: time that nothing hid.

        Args:
            exchange: the exchange that it waited for.
            start_s, end_s: begin and end of the wait, in seconds on the clock of the session's peer.
        """

    def phase(self, name: str, start_s: float) -> None:
        """A phase of the step begins, and ends the one before.

        Args:
            name: `delay`, `forward`, `backward` or `optimizer`.
            start_s: in seconds on the clock of the session's peer.
        """

    def step_ended(self, step: int, end_s: float) -> None:
        """A step has ended, and with it its last phase.

        Args:
            step: counted from 0.
            end_s: in seconds on the clock of the session's peer.
        """

    def close(self) -> None:
        """The session is closed; collective."""

    def abandon(self) -> None:
        """The session was left by an error; not collective, as the other ranks may not be there."""


@dataclass
class OverlapClock:
    """A counter of the seconds a rank's exchanges were under way, and its training thread waited for them.

    Time in which several exchanges are under way counts once. An exchange is under way from its start until the
    training thread finds that it is over: in a wait, or when a gradient arrives.

    Attributes:
        under_way_s: seconds in which at least one exchange was under way, up to the last moment when none was.
        exposed_wait_s: the part of these seconds in which the training thread waited.
    """

    under_way_s: float = 0.0
    exposed_wait_s: float = 0.0
    _num_under_way: int = 0
    _since_s: float = 0.0

    def start(self, now_s: float) -> None:
        """Count an exchange as under way, from a time in seconds."""
        if self._num_under_way == 0:
            self._since_s = now_s
        self._num_under_way += 1

    def end(self, now_s: float) -> None:
        """Count one exchange less as under way, from a time in seconds."""
        self._num_under_way -= 1
        if self._num_under_way == 0:
            self.under_way_s += now_s - self._since_s


class ObservedRequest(Request):
    """A request that notes the start, the end and the waits of another one's exchange.

    The notes cost about a microsecond for each exchange; events are made only for an observer.
    """

    __slots__ = ("_clock", "_event", "_held", "_now", "_observer", "_over", "_start_s")

    def __init__(
        self,
        start: Callable[[], Request],
        now: Callable[[], float],
        clock: OverlapClock,
        observer: Observer | None,
        name: str,
        round: int,
        num_bytes: float,
    ) -> None:
        """Start the exchange.

        Args:
            start: starts the exchange and returns its request.
            now: returns the time of the peer's clock, in seconds.
            clock: the session's counter.
            observer: gets the exchange's events; None for nobody.
            name: the segment's name.
            round: the exchange's round.
            num_bytes: the bytes that this rank sends.

        Raises:
            Exception: any error of `start`.
        """
        self._now = now
        self._clock = clock
        self._observer = observer
        self._over = False
        self._start_s = now()
        clock.start(self._start_s)
        if observer is not None:
            self._event = ExchangeEvent(name, round, num_bytes, self._start_s)
            observer.started(self._event)
        try:
            self._held = start()
        except Exception as error:
            self._end(error)
            raise

    def done(self) -> bool:
        if not self._over:
            try:
                finished = self._held.done()
            except Exception as error:
                self._end(error)
                raise
            if finished:
                self._end()
        return self._over

    def wait(self, timeout_s: float | None = None) -> Any:
        if self._over:
            return self._held.wait(timeout_s)
        start_s = self._now()
        failure: BaseException | None = None
        try:
            return self._held.wait(timeout_s)
        except BaseException as error:
            failure = error
            raise
        finally:
            end_s = self._now()
            self._clock.exposed_wait_s += end_s - start_s
            if self._observer is not None:
                self._observer.waited(self._event, start_s, end_s)
            self._end(failure)

    @property
    def result(self) -> Any:
        return self._held.result

    def _end(self, error: BaseException | None = None) -> None:
        if self._over:
            return  # an operation that the wait advanced may have found this done, too
        self._over = True
        end_s = self._now()
        self._clock.end(end_s)
        if self._observer is not None:
            event = replace(self._event, end_s=end_s)
            if error is None:
                self._observer.complete(event)
            else:
                self._observer.failed(event, error)
