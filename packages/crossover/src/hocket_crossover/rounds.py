"""A topology's draws by round, each round's for all segments at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hocket_crossover.derangements import DrawKey

__all__ = ["Rounds"]

T = TypeVar("T")

# Ranks in one process may be some rounds apart.
_KEPT = 4


class Rounds(Generic[T]):
    """Draws by (round, segment), which only depend on these: what is kept changes how fast they come.

    A round is drawn with all segments that were asked for in the one before it.

    Args:
        draw: from keys to what is drawn for each.
    """

    def __init__(self, draw: Callable[[Sequence[DrawKey]], Sequence[T]]) -> None:
        self._draw = draw
        self._kept: dict[int, dict[int, T]] = {}
        #: The segments asked for since a round was last drawn, as keys.
        self._asked: dict[int, None] = {}
        self._lock = threading.Lock()

    def of(self, round: int, segment: int) -> T:
        """Return what is drawn for a segment in a round."""
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
