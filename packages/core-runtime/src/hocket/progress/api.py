"""What advances the exchanges that are under way while nobody waits for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from hocket.progress.driver import Driver
from hocket.progress.run import Run
from hocket.schedule.schedule import Schedule
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["ProgressEngine"]

# A look costs 2 to 3 us. With an exchange for each of 161 layers, looking at all of them at each layer would take 30 ms
# of a step; and any look has MPI go on with everything.
_LOOKS_AT_A_TIME = 8


class ProgressEngine(ABC):
    """Carries out schedules, and advances requests between their start and somebody's wait."""

    def __init__(self) -> None:
        self._outstanding: deque[Request] = deque()
        self._runs: list[Run] = []

    def watch(self, request: Request) -> None:
        """Advance `request` in `advance` from now on, until it is done.

        It stays the training thread's, in every mode: MPI lets no two threads look at one request at once.
        """
        self._outstanding.append(request)

    def carry(self, request: Request, peer: Peer, name: str) -> Request:
        """Have `request` advanced while the training thread computes, if this engine can; else return it as it is.

        Args:
            request: just started; used through what is returned from now on.
            peer: this rank's endpoint.
            name: stands in messages, for instance `gradients.0[3]`.
        """
        return request

    def advance(self) -> None:
        """Look at a few of what is under way, in turns; called where the training thread can spare microseconds.

        Raises:
            TransportError: an exchange failed.
        """
        for _ in range(min(len(self._outstanding), _LOOKS_AT_A_TIME)):
            request = self._outstanding.popleft()
            if not request.done():
                self._outstanding.append(request)

    def open(self, schedule: Schedule, peer: Peer, name: str) -> Run:
        """Begin to carry out `schedule`, with a lane of its own; collective among the ranks of `peer`.

        Args:
            schedule: this rank's part.
            peer: this rank's endpoint among the ranks that the schedule counts.
            name: stands in messages, for instance `gradients.0[3]`.
        """
        driver = self._driver_for(peer)
        run = Run(driver.open(schedule, peer, name), driver, self)
        self._runs.append(run)
        return run

    def close(self) -> None:
        """Close what is still open, in the order in which it was opened, and stop; collective.

        Raises:
            ExchangeTimeoutError: a rank has not closed in time.
            TransportError: an execution has failed.
        """
        while self._runs:
            self._runs[0].close()
            del self._runs[0]
        self._stop()

    @abstractmethod
    def nudge(self) -> None:
        """See `hocket.progress.run.Waiter`."""

    @abstractmethod
    def wait_until(
        self, over: Callable[[], bool], describe: Callable[[], str], timeout_s: float | None
    ) -> None:
        """See `hocket.progress.run.Waiter`."""

    @abstractmethod
    def _driver_for(self, peer: Peer) -> Driver:
        """Return this rank's driver, made for its first schedule."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop carrying out schedules; not collective."""
