"""What the application holds of a schedule that a progress engine carries out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hocket.progress.attended import Attended
from hocket.progress.driver import Driver
from hocket.transport.request import Request

__all__ = ["RoundRequest", "Run", "Waiter"]


class Waiter(Protocol):
    """How an engine's application thread sees to it that something happens."""

    def nudge(self) -> None:
        """Have changes of the application looked at soon; never blocks."""

    def wait_until(
        self, over: Callable[[], bool], describe: Callable[[], str], timeout_s: float | None
    ) -> None:
        """Block until `over()`.

        Raises:
            ExchangeTimeoutError: not in time; carries what `describe` says.
            TransportError: an execution failed.
        """


class Run:
    """A schedule that is carried out round after round, on this rank and on the others of its peer.

    Rounds count from 0 and end in order. With a persistent schedule other ranks can start them too.
    Of what the rounds compute, buffers hold the newest: with a persistent schedule the next round may begin, and
    overwrite them, as soon as one has ended. Have the schedule's last computation copy what must last.
    """

    def __init__(self, attended: Attended, driver: Driver, waiter: Waiter) -> None:
        self._attended = attended
        self._driver = driver
        self._waiter = waiter
        self._closed = False

    @property
    def num_ended(self) -> int:
        """How many rounds have ended on this rank."""
        return self._attended.ended

    def start(self, round: int) -> RoundRequest:
        """Say that the application has arrived at `round` (internal activation); never blocks.

        If the round has ended without it, or is under way, that changes nothing.

        Returns:
            Done when the round has ended on this rank.

        Raises:
            TransportError: an execution has failed.
        """
        self._driver.check()
        if round >= self._attended.ended:
            self._attended.trigger(round)
            self._waiter.nudge()
        return RoundRequest(self, round)

    def nudge(self) -> None:
        """Have the schedule's gates looked at soon; never blocks. Any thread of the rank may call it."""
        self._waiter.nudge()

    def ended(self, round: int) -> bool:
        """Return whether `round` has ended on this rank.

        Raises:
            TransportError: an execution has failed.
        """
        self._driver.check()
        return self._attended.ended > round

    def wait(self, round: int, timeout_s: float | None = None) -> None:
        """Block until `round` has ended on this rank, without burning a core.

        Raises:
            ExchangeTimeoutError: not in time; names exchange, round and whose messages are missing.
            TransportError: an execution has failed.
        """
        self._wait_until(lambda: self._attended.ended > round, f"round {round}", timeout_s)

    def close(self) -> None:
        """Answer the others until all have closed, then give back what the schedule holds; collective.

        All rounds that any rank has started end before. Afterwards rounds can be asked for, but not started.

        Raises:
            ExchangeTimeoutError: a rank has not closed in time.
            TransportError: an execution has failed.
        """
        if self._closed:
            return
        self._attended.close()
        self._waiter.nudge()
        self._wait_until(lambda: self._attended.closed, "the end", None)
        self._closed = True
        self._driver.forget(self._attended)
        self._attended.lane.close()

    def _wait_until(self, over: Callable[[], bool], what: str, timeout_s: float | None) -> None:
        self._driver.check()
        if over():
            return
        peer, attended = self._driver.peer, self._attended

        def describe() -> str:
            return f"{what} of {attended.name}, of which here {attended.describe()}"

        peer.status.note_waiting(what, attended.name)
        self._waiter.wait_until(over, describe, timeout_s)
        peer.status.note_computing()
        self._driver.check()


class RoundRequest(Request):
    """The future of one round; its result is the round's number."""

    __slots__ = ("_round", "_run")

    def __init__(self, run: Run, round: int) -> None:
        self._run = run
        self._round = round

    def done(self) -> bool:
        return self._run.ended(self._round)

    def wait(self, timeout_s: float | None = None) -> int:
        self._run.wait(self._round, timeout_s)
        return self._round

    @property
    def result(self) -> int:
        return self._round
