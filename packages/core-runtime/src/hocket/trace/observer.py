"""Events of a session while it trains: exchanges that start and end, waits, and a step's phases."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.transport.peer import Peer


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
