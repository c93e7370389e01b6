"""Operations held back until a clock has passed: the virtual one, or the wall's."""

from __future__ import annotations

import heapq
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hocket.errors import TransportError
from hocket.transport.peer import Peer
from hocket.transport.request import Request
from hocket.transport.signals import Event
from hocket.transport.waiting import wait

# What it costs a virtual rank to look at an operation that has not begun, in seconds.
_LOOK_S = 1e-6


class Clock(ABC):
    """A clock that begins held-back operations when they are due."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._peer.clock.now()

    @abstractmethod
    def hold(self, request: FaultyRequest, seconds: float) -> None:
        """Begin `request` when `seconds` have passed."""

    @abstractmethod
    def look(self, request: FaultyRequest | None = None) -> None:
        """Begin this thread's held-back operations that are due; on a virtual clock a look at `request` takes time."""

    @abstractmethod
    def wait_until_begun(self, request: FaultyRequest, timeout_s: float) -> None:
        """Wait until `request` has begun, so that waiting for its held request is safe.

        Raises:
            ExchangeTimeoutError: it has not begun in `timeout_s` seconds.
        """

    def drain(self) -> None:  # noqa: B027 (the simulation begins by itself what is held back)
        """Wait until this thread holds nothing back."""


def clock_of(peer: Peer) -> Clock:
    """Return a clock for `peer`'s operations."""
    return _VirtualClock(peer) if peer.clock.call_later(0.0, lambda: None) else _WallClock(peer)


class _VirtualClock(Clock):
    def hold(self, request: FaultyRequest, seconds: float) -> None:
        request.begun = self._peer.threads.event()
        self._peer.clock.call_later(seconds, request.begin)

    def look(self, request: FaultyRequest | None = None) -> None:
        if request is not None and not request.has_begun:
            self._peer.clock.elapse(_LOOK_S)

    def wait_until_begun(self, request: FaultyRequest, timeout_s: float) -> None:
        if not request.has_begun and request.begun is not None:
            request.begun.wait(lambda: request.what, timeout_s)


class _WallClock(Clock):
    """The wall's clock: each thread holds back its own operations and begins them itself."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self._held = threading.local()
        self._order = itertools.count()

    def hold(self, request: FaultyRequest, seconds: float) -> None:
        heapq.heappush(self._heap(), (self._peer.clock.now() + seconds, next(self._order), request))

    def look(self, request: FaultyRequest | None = None) -> None:
        heap = self._heap()
        while heap and heap[0][0] <= self._peer.clock.now():
            heapq.heappop(heap)[2].begin()

    def wait_until_begun(self, request: FaultyRequest, timeout_s: float) -> None:
        # Others may need what is held back to give what this one waits for.
        if self._heap():
            self._wait(lambda: not self._heap() or request.is_done(), request.what, timeout_s)

    def drain(self) -> None:
        self._wait(lambda: not self._heap(), "what was held back", self._peer.timeout_s)

    def _wait(self, over: Callable[[], bool], what: str, timeout_s: float) -> None:
        def look() -> bool:
            self.look()
            return over()

        wait(look, timeout_s, lambda outcome: f"rank {self._peer.rank}: {what}: {outcome}")

    def _heap(self) -> list[tuple[float, int, FaultyRequest]]:
        if not hasattr(self._held, "heap"):
            self._held.heap = []
        heap: list[tuple[float, int, FaultyRequest]] = self._held.heap
        return heap


class FaultyRequest(Request[Any]):
    """An operation that is begun later, and not before the one that it has to follow.

    Args:
        clock: the clock that holds it back.
        start: begins it.
        what: the operation, for messages.
        timeout_s: default timeout of waits, in seconds.
        before: the request that must have begun first, if any.

    Attributes:
        begun: an event that is set when it begins, if given.
    """

    def __init__(
        self,
        clock: Clock,
        start: Callable[[], Request],
        what: str,
        timeout_s: float,
        before: FaultyRequest | None = None,
    ) -> None:
        self.what = what
        self.begun: Event | None = None
        self._clock = clock
        self._start = start
        self._timeout_s = timeout_s
        self._before = before
        self._then: FaultyRequest | None = None
        self._held: Request | None = None
        self._error: TransportError | None = None

    @property
    def has_begun(self) -> bool:
        """Tell whether it has begun."""
        return self._held is not None or self._error is not None

    def begin(self) -> None:
        """Begin, if it has not; at once, or when `before` does."""
        if self.has_begun:
            return
        if self._before is not None and not self._before.has_begun:
            self._before._then = self
            return
        self._before = None
        try:
            self._held = self._start()
        except TransportError as error:
            # For whoever waits: what happens to begin it may be another operation's wait.
            self._error = error
        if self.begun is not None:
            self.begun.set()
        if self._then is not None:
            self._then.begin()

    def begin_now(self) -> None:
        """Begin, unless another request must go first.

        Raises:
            TransportError: the operation is refused.
        """
        self.begin()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        """Return whether it has begun and finished, and begin nothing."""
        return self.has_begun and self._begun_request().done()

    def done(self) -> bool:
        self._clock.look(self)
        return self.is_done()

    def wait(self, timeout_s: float | None = None) -> Any:
        longest_s = self._timeout_s if timeout_s is None else timeout_s
        start_s = self._clock.now()
        self._clock.wait_until_begun(self, longest_s)
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s - (self._clock.now() - start_s))
        return self._begun_request().wait(timeout_s)

    @property
    def result(self) -> Any:
        return None if self._held is None else self._held.result

    def withdraw(self) -> None:
        self._begun_request().withdraw()

    def _begun_request(self) -> Request:
        if self._error is not None:
            raise self._error
        assert self._held is not None
        return self._held
