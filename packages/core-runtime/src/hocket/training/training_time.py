"""A rank's training time: the seconds of its clock, without those in which the run is measured or saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.session.api import TrainingSession

__all__ = ["TrainingTime"]


@dataclass
class _Reading:
    """What a rank's clock and its counter of waits say.

    Attributes:
        seconds: of the clock.
        waited_s: of the exposed waits.
    """

    seconds: float = 0.0
    waited_s: float = 0.0


class TrainingTime:
    """Counts seconds from `go_on` to `pause`, and the exposed waits within them.

    Where ranks meet to be measured, the early ones wait for the late ones; training alone would not have them meet. So
    a pause counts on no rank. On the virtual clock ranks leave it as far apart as they came, so that a rank is as late
    for the next exchange as without it; on the wall's they leave it together.

    Args:
        session: whose clock and counters these are.
    """

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._counted = _Reading()
        self._since: _Reading | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training on this rank so far."""
        return self._read().seconds

    @property
    def waited_s(self) -> float:
        """Seconds of these in which this rank waited for an exchange."""
        return self._read().waited_s

    def pause(self) -> None:
        """Stop counting."""
        self._counted, self._since = self._read(), None

    def go_on(self) -> None:
        """Count again; collective, but where there was no pause."""
        if self._since is not None:
            return
        own_s = self._counted.seconds
        self._session.peer.clock.elapse(own_s - min(self._session.gather(own_s)))
        self._since = self._now()

    def state_dict(self) -> dict[str, float]:
        """Return what has been counted."""
        return vars(self._read())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, paused."""
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
