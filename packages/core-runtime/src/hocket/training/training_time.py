"""A rank's training time: the seconds of its clock, without those in which the run is measured or saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.plain import Tree

if TYPE_CHECKING:
    from hocket.session.session import Session


@dataclass
class _Reading:
    """A reading of a rank's clock and of its counter of waits.

    Attributes:
        seconds: the clock's seconds.
        waited_s: the seconds of exposed waits.
    """

    seconds: float = 0.0
    waited_s: float = 0.0


class TrainingTime:
    """A counter of the seconds from `go_on` to `pause`, and of the exposed waits within them.

    To be measured, early ranks wait for late ones, as they would not in training alone. So a pause counts on no rank.
    On the virtual clock ranks leave a pause as far apart as they came, so that a rank is as late for the next exchange
    as without it; on the wall clock they leave it together.

    Args:
        session: the session whose clock and counters are read.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counted = _Reading()
        self._since: _Reading | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training on this rank so far."""
        return self._read().seconds

    @property
    def waited_s(self) -> float:
        """The part of these seconds in which this rank waited for an exchange."""
        return self._read().waited_s

    def pause(self) -> None:
        """Stop counting."""
        self._counted, self._since = self._read(), None

    def go_on(self) -> None:
        """Count again; collective after a pause, else without effect."""
        if self._since is not None:
            return
        own_s = self._counted.seconds
        self._session.peer.clock.elapse(own_s - min(self._session.gather(own_s)))
        self._since = self._now()

    def state_dict(self) -> dict[str, float]:
        """Return the counted seconds."""
        return vars(self._read())

    def load_state_dict(self, state: Tree) -> None:
        """Continue from a `state_dict`, paused."""
        self._counted, self._since = _Reading(**state), None

    def _read(self) -> _Reading:
        if self._since is None:
            return self._counted
        now, since, counted = self._now(), self._since, self._counted
        return _Reading(
            counted.seconds + (now.seconds - since.seconds),
            counted.waited_s + (now.waited_s - since.waited_s),
        )

    def _now(self) -> _Reading:
        return _Reading(self._session.peer.clock.now(), self._session.counters.exposed_wait_s)
