"""The state of a session within its step, and the moves that lead from one state to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Literal

from hocket.errors import SessionError


class SessionState(Enum):
    """The state of a session within its step; it decides which moves are allowed next."""

    IDLE = "before this step's gradients are exchanged, or between two steps"
    ACCUMULATED = "after backwards whose gradients were only added up"
    EXCHANGED = "before the optimizers that use what was exchanged"
    STEPPED = "after the first of several optimizers"
    CONSENSUS = "within consensus()"
    BROKEN = "broken"
    CLOSED = "closed"


IDLE, ACCUMULATED, EXCHANGED, STEPPED, CONSENSUS, BROKEN, CLOSED = SessionState

_CURES = {
    BROKEN: "an error ended this session, and other ranks may have continued: attach again",
    CLOSED: "this session is closed: attach again, or make the call before close()",
    CONSENSUS: (
        "within `with session.consensus()` the model holds the replicas' mean, so a step or a load would be lost, "
        "and a save would write the mean: do it after the block"
    ),
}

#: `look` and `train` are calls that change no state, of which `train` needs the trained replica; `begin` is the start
#: of a batch, a closure or a backward, `step` that of one optimizer, and `end` that of all.
Move = Literal[
    "look", "train", "begin", "accumulate", "exchange", "step", "end", "average", "close", "abandon"
]

_STAYS = {state: state for state in (IDLE, ACCUMULATED, EXCHANGED, STEPPED)}

#: The next state, by move and present state; a move is refused in the states that it lacks. The end of a step keeps
#: what came after the optimizers' first: gradients of the next step.
MOVES: Mapping[Move, Mapping[SessionState, SessionState]] = {
    "look": _STAYS | {CONSENSUS: CONSENSUS},
    "train": _STAYS,
    "begin": dict.fromkeys(_STAYS, IDLE),
    "accumulate": dict.fromkeys(_STAYS, ACCUMULATED),
    "exchange": dict.fromkeys(_STAYS, EXCHANGED),
    "step": _STAYS | {ACCUMULATED: IDLE, EXCHANGED: STEPPED},
    "end": _STAYS | {STEPPED: IDLE},
    "average": dict.fromkeys([*_STAYS, CONSENSUS], CONSENSUS),
    "close": dict.fromkeys([*_STAYS, CONSENSUS], CLOSED),
    "abandon": dict.fromkeys(SessionState, BROKEN),
}


class StepState:
    """The state of one session, which all that depends on it ask.

    Args:
        place: says the rank and the step, for refusals.

    Attributes:
        now: the state.
        accumulating: whether backwards only add to `p.grad`, as within `session.accumulate`.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        self._place = place
        self.now = IDLE
        self.accumulating = False

    def move(self, move: Move, call: str = "") -> None:
        """Make a move, or refuse it.

        Args:
            move: a row of `MOVES`.
            call: the user's, for the message.

        Raises:
            SessionError: the state does not allow it; says why, and what to do.
        """
        following = MOVES[move].get(self.now)
        if following is None:
            raise SessionError(f"{call or move} on {self._place()}: {_CURES[self.now]}")
        self.now = following

    @property
    def ended(self) -> bool:
        """Tell whether the session is broken or closed."""
        return self.now in (BROKEN, CLOSED)

    @property
    def accumulated(self) -> bool:
        """Tell whether `p.grad` holds gradients that were only added up."""
        return self.now is ACCUMULATED

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Surround backwards that only add to `p.grad`."""
        self.move("accumulate", "session.accumulate")
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    @contextmanager
    def average(self) -> Iterator[None]:
        """Surround the use of the replicas' mean, after which the state is as before unless the session has ended."""
        before = self.now
        self.move("average", "session.consensus")
        try:
            yield
        finally:
            if not self.ended:
                self.now = before
