"""What a session tells an observer: exchanges that start and end, waits, and the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.transport.peer import Peer

__all__ = ["ExchangeEvent", "Observer"]


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One exchange of one segment in one round, on this rank.

    Attributes:
        name: the segment's, for instance `gradients.0[3]`.
        round: the exchange's own counter, from 0.
        num_bytes: what this rank sends, as the collective's algorithm counts it.
        start_s: when it was started, on the peer's clock.
        end_s: when the training thread knew that it was over; None while it is under way.
    """

    name: str
    round: int
    num_bytes: float
    start_s: float
    end_s: float | None = None


class Observer:
    """Is told what a session does, on the training thread; subclasses override what they want to know.

    An observer belongs to one session on one rank. It changes nothing, and raises only to end the training. All
    times are seconds on the clock of the session's peer.
    """

    def join(self, peer: Peer) -> Peer:
        """Return what the session communicates through: `peer`, or one that holds it; collective."""
        return peer

    def started(self, exchange: ExchangeEvent) -> None:
        """An exchange is about to start."""

    def complete(self, exchange: ExchangeEvent) -> None:
        """An exchange has its result."""

    def failed(self, exchange: ExchangeEvent, error: BaseException) -> None:
        """An exchange could not be started or did not come to its end; `error` is raised next."""

    def waited(self, exchange: ExchangeEvent, start_s: float, end_s: float) -> None:
        """The training thread waited for an exchange that was under way: time that nothing hid."""

    def phase(self, name: str, start_s: float) -> None:
        """A phase of the step begins, and ends the one before: `delay`, `forward`, `backward`, `optimizer`."""

    def step_ended(self, step: int, end_s: float) -> None:
        """A step, counted from 0, has ended, and with it its last phase."""

    def close(self) -> None:
        """The session is closed; collective."""

    def abandon(self) -> None:
        """The session was left by an error; not collective, as the other ranks may not be there."""
