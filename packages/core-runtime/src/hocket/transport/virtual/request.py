"""The future of an operation on a virtual rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.errors import TransportError
from hocket.transport.peer import Request
from hocket.transport.virtual.scheduler import Scheduler
from hocket.transport.virtual.task import Signal

__all__ = ["VirtualRequest"]


class VirtualRequest(Request):
    """Finished by the simulation, at a moment of virtual time.

    `done` charges `poll_s`; `wait` jumps to the moment at which the operation finishes.
    """

    __slots__ = ("_describe", "_error", "_poll_s", "_rank", "_result", "_scheduler", "_signal", "_timeout_s")

    def __init__(
        self, scheduler: Scheduler, rank: int, timeout_s: float, poll_s: float, describe: Callable[[], str]
    ) -> None:
        """Make the request of an operation that has not finished.

        Args:
            scheduler: whose tasks may wait for it.
            rank: the world's rank that it belongs to.
            timeout_s: virtual seconds that a wait lasts if it does not say.
            poll_s: virtual seconds that a call of `done` costs.
            describe: says what is awaited and from whom.
        """
        self._scheduler = scheduler
        self._rank = rank
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._describe = describe
        self._signal = Signal()
        self._error: str | None = None
        self._result: Any = None

    def done(self) -> bool:
        self._scheduler.poll(self._rank, self._poll_s)
        self._raise_if_failed()
        return self._signal.is_set

    def wait(self, timeout_s: float | None = None) -> Any:
        self._scheduler.wait(self._rank, self._signal, self._describe, self._timeout_s, timeout_s)
        self._raise_if_failed()
        return self._result

    @property
    def result(self) -> Any:
        return self._result

    def finish(self, result: Any = None) -> None:
        """Note that the operation has finished and gave `result`; called by the simulation."""
        self._result = result
        self._scheduler.fire(self._signal)

    def fail(self, message: str) -> None:
        """Note that the operation has failed: `done` and `wait` raise TransportError with `message`."""
        self._error = message
        self._scheduler.fire(self._signal)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise TransportError(self._error)
