"""Between a session and the loaders that it reads: which share of the samples is read, and how much a batch counts.

A loader of `hocket.loader` finds the reading in force whenever it is read, also through other iterables:
`session.data(tqdm(loader))`, `session.data(zip(one, other))`.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Reading", "reading_in_force"]

_here = threading.local()


def reading_in_force() -> Reading | None:
    """Return the reading on whose behalf this thread reads a loader; None outside of a session's pass."""
    return getattr(_here, "reading", None)


class Reading:
    """One pass's reading of its loaders; in force within its `with` statement.

    Args:
        rank, size: which share of the samples is read, and of how many.
        epoch: the number of the pass, from 0, from which the order of its samples is drawn.

    Attributes:
        facts: what loaders have said of themselves, in which all ranks have to agree: JSON values by name.
        unweighed: whether batches counted differently, and nobody could tell which one is which.
    """

    def __init__(self, rank: int, size: int, epoch: int) -> None:
        self.rank, self.size, self.epoch = rank, size, epoch
        self.facts: list[dict[str, Any]] = []
        self.unweighed = False
        self._noted: list[tuple[int, float]] = []
        self._in_step = True
        self._outer: Reading | None = None

    def __enter__(self) -> None:
        self._outer = reading_in_force()
        _here.reading = self

    def __exit__(self, *_: object) -> None:
        _here.reading = self._outer

    def note(self, loader: object, weight: float) -> None:
        """Take note of a batch that a loader gives, and of how much it counts."""
        self._noted.append((id(loader), weight))

    def take_weight(self) -> float | None:
        """Return how much the batch counts that has just been read; None where no loader has said so."""
        noted, self._noted = self._noted, []
        # A loader that was read twice at once, or not at all, is read ahead: its weights are other batches'.
        self._in_step &= len({loader for loader, _ in noted}) == len(noted)
        weights = {weight for _, weight in noted}
        if self._in_step and len(weights) == 1:
            return weights.pop()
        self.unweighed |= bool(weights - {1.0})
        return None
