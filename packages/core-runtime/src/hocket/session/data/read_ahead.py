"""The weights of batches in loops that fetch them ahead of training, as prefetchers and readers of groups do.

Such a loop fetches k batches before it trains with the first, and then one for each that it trains with: each is
weighed when its turn comes, the last k after the pass. Or it fetches a group, trains with all of it, and fetches the
next: the batches of a group are weighed alike, as it is not known which of them is trained with.
"""

from __future__ import annotations

from collections import deque

__all__ = ["ReadAhead"]


class ReadAhead:
    """The weights of the batches that a loop has fetched and not trained with, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[float] = deque()
        self._current = 1.0
        #: Whether no rank has trained since the newest batch was fetched.
        self._only_fetched = False
        self._has_trained = self._in_groups = False
        self._pass_has_ended = True

    def begin(self, weight: float, *, untouched: bool) -> float:
        """Note that a batch is fetched; return the weight of the one that is trained with next.

        Args:
            weight: of the fetched batch.
            untouched: whether nothing was trained with the previous one on this rank, since `note_fetched`.
        """
        if self._pass_has_ended:
            self._waiting.clear()
            self._has_trained = self._only_fetched = self._pass_has_ended = False
        else:
            self._end_batch(untouched=untouched)
        self._waiting.append(weight)
        if self._in_groups:
            return self._mean()
        self._current = self._waiting.popleft()
        return self._current

    def note_fetched(self) -> None:
        """Note that no rank has trained since the newest batch was fetched."""
        self._only_fetched = True

    def _end_batch(self, *, untouched: bool) -> None:
        only_fetched, self._only_fetched = self._only_fetched and untouched, False
        if not only_fetched:
            self._has_trained = True
            if self._in_groups:
                self._waiting.clear()
        elif not self._in_groups:
            self._waiting.appendleft(self._current)
        if only_fetched and self._has_trained:
            # Nothing is fetched alone between two trainings, unless all of the group before has been used.
            self._in_groups, self._has_trained = True, False
            self._waiting = deque([self._waiting[-1]])

    def end_pass(self, *, untouched: bool) -> float | None:
        """Note that a pass is over; return as `following` does.

        Args:
            untouched: as for `begin`.
        """
        if not self._pass_has_ended:
            self._end_batch(untouched=untouched)
            self._pass_has_ended = True
        return self.following()

    def following(self) -> float | None:
        """Return the weight of the next batch that waits after a pass; None where none does."""
        if not self._waiting:
            return None
        if not self._in_groups:
            return self._waiting.popleft()
        mean = self._mean()
        self._waiting.clear()
        return mean

    def _mean(self) -> float:
        return sum(self._waiting) / len(self._waiting)
