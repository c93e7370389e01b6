"""A topology's draws by round, each round's for all segments at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hocket_crossover.derangements import DrawKey

T = TypeVar("T")

# Ranks in one process may be some rounds apart.
_KEPT = 4


class Rounds(Generic[T]):
    """Draws by (round, segment), on which alone they depend.

    A cache of them changes only the speed: a round is drawn with all segments that were asked for in the one before.

    Args:
        draw: returns a draw for each of some keys.
    """

    def __init__(self, draw: Callable[[Sequence[DrawKey]], Sequence[T]]) -> None:
        self._draw = draw
        self._kept: dict[int, dict[int, T]] = {}
        #: The segments asked for since a round was last drawn, as keys.
        self._asked: dict[int, None] = {}
        self._lock = threading.Lock()

    def of(self, round: int, segment: int) -> T:
        """Return the draw of a segment in a round."""
        with self._lock:
            if round not in self._kept:
                self._begin(round)
            self._asked[segment] = None
            known = self._kept[round]
            if segment not in known:
                [known[segment]] = self._draw([(round, segment)])
            return known[segment]

    def _begin(self, round: int) -> None:
        segments, self._asked = list(self._asked), {}
        drawn = self._draw([(round, segment) for segment in segments]) if segments else ()
        self._kept[round] = dict(zip(segments, drawn, strict=True))
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
