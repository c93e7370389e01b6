"""Operations that may be held back before they begin, and messages that never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hocket.errors import TransportError
from hocket.transport.request import Request
from hocket.transport.signals import Event

if TYPE_CHECKING:
    from hocket.transport.faults.clock import Clock

__all__ = ["FaultyRequest"]


class FaultyRequest(Request):
    """An operation that begins when it is told to, and not before the one that it has to follow.

    Args:
        clock: what holds it back.
        start: begins it.
        what: the operation, for messages.
        timeout_s: how long waits last that do not say, in seconds.
        before: what must have begun first, if anything.

    Attributes:
        begun: set when it begins, if somebody gave it an event.
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
        """Whether it is held back no longer."""
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
        """Begin, unless something must go first.

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
