"""What a topology draws for a round: for all segments at once, some rounds together, and much of it ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from hocket_crossover.derangements import Place

__all__ = ["Rounds"]

T = TypeVar("T")

# Ranks in one process may be some rounds apart.
_KEPT = 4

# Between two steps, when all caches are cold, a draw takes half a millisecond however small it is: so small ones are
# made for many rounds at once.
_TOGETHER = 16

# So many numbers take about half a millisecond, too: of these one round is enough, and a thread makes it ahead.
_MUCH = 1 << 15


class Rounds(Generic[T]):
    """Draws by (round, segment), which only depend on these: what is kept changes how fast they come.

    The first of some rounds is drawn together with the others, and with the segments that were asked for before.

    Args:
        draw: from places to what is drawn for each; NumPy that leaves the GIL to others.
        size: how many numbers are drawn for a place.
    """

    def __init__(self, draw: Callable[[Sequence[Place]], Sequence[T]], size: int) -> None:
        self._draw = draw
        self._size = size
        self._kept: dict[int, dict[int, T]] = {}
        #: The segments asked for since rounds were last drawn, as keys.
        self._asked: dict[int, None] = {}
        self._ahead: tuple[int, Future[dict[int, dict[int, T]]]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def of(self, round: int, segment: int) -> T:
        """Return what is drawn for a segment in a round."""
        with self._lock:
            if round not in self._kept:
                self._begin(round)
            self._asked[segment] = None
            known = self._kept[round]
            if segment not in known:
                self._add(segment, round)
            return known[segment]

    def _add(self, segment: int, first: int) -> None:
        """Draw a segment that was not foreseen, for all rounds from `first` on that are kept without it."""
        lacking = [round for round, known in self._kept.items() if round >= first and segment not in known]
        for round, drawn in zip(lacking, self._draw([(round, segment) for round in lacking]), strict=True):
            self._kept[round][segment] = drawn

    def _begin(self, round: int) -> None:
        """Keep `round`, and those that come after it if they are small."""
        segments, self._asked = list(self._asked), {}
        much = self._size * len(segments)
        num_rounds = max(1, min(_TOGETHER, _MUCH // much)) if segments else 1
        if self._ahead is not None and self._ahead[0] == round:
            drawn = self._ahead[1].result()
        else:
            drawn = self._drawn(round, num_rounds, segments)
        self._ahead = None
        self._kept.update(drawn)
        while len(self._kept) > _KEPT + num_rounds:
            del self._kept[next(iter(self._kept))]
        if much >= _MUCH:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="hocket-crossover")
            self._ahead = (round + 1, self._thread.submit(self._drawn, round + 1, 1, segments))

    def _drawn(self, first: int, num_rounds: int, segments: Sequence[int]) -> dict[int, dict[int, T]]:
        """Return what is drawn for some rounds, by round and segment."""
        rounds = range(first, first + num_rounds)
        places = [(round, segment) for round in rounds for segment in segments]
        drawn = iter(self._draw(places) if places else ())
        return {round: dict(zip(segments, drawn, strict=False)) for round in rounds}
