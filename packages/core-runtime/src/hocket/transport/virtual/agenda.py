"""What is to happen, in the order of virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

from hocket.transport.virtual.task import Task

__all__ = ["Agenda", "Event"]

Event = Callable[[], None]

#: Events come before tasks that are due at the same time; tasks draw from [0, 1).
_EVENT_PRIORITY = -1.0


class Agenda:
    """Events, and tasks that are ready to run, by the moment at which they are due.

    Of what is due at the same moment, events come first, in the order in which they were planned; between
    tasks a seeded draw decides.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed).random
        self._order = itertools.count()
        self._heap: list[tuple[float, float, int, Task | Event]] = []

    @property
    def next_due_s(self) -> float:
        """The virtual time at which something is due next; infinity where nothing is."""
        return self._heap[0][0] if self._heap else math.inf

    def add_event(self, due_s: float, event: Event) -> None:
        heapq.heappush(self._heap, (due_s, _EVENT_PRIORITY, next(self._order), event))

    def add_task(self, due_s: float, task: Task) -> None:
        heapq.heappush(self._heap, (due_s, self._draw(), next(self._order), task))

    def pop(self) -> tuple[float, Task | Event]:
        """Remove what is due next and return it with the time at which it is due."""
        due_s, _, _, item = heapq.heappop(self._heap)
        return due_s, item
