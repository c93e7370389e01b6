"""The firing of a schedule's operations: each once in a round, after the operations that it depends on."""

from __future__ import annotations

from collections import deque

from hocket.schedule.operations import Logic
from hocket.schedule.schedule import Schedule


class Firing:
    """The fired and the done operations of a schedule, in one round after the other.

    Attributes:
        queue: operations that have fired and are not performed yet, by their number.
        fired, done: in this round.
    """

    def __init__(self, schedule: Schedule) -> None:
        number = {operation.name: i for i, operation in enumerate(schedule.operations)}
        self.queue: deque[int] = deque()
        self.fired: set[int] = set()
        self.done: set[int] = set()
        self._last = frozenset(number[name] for name in schedule.last)
        self._needed: list[int] = []
        self._missing: list[int] = []
        self._dependents: list[list[int]] = [[] for _ in number]
        for i, operation in enumerate(schedule.operations):
            count = len(operation.after)
            self._needed.append(min(count, 1) if operation.logic is Logic.ANY else count)
            for name in operation.after:
                self._dependents[number[name]].append(i)
        trigger = None if schedule.trigger is None else number[schedule.trigger]
        self._first = [i for i, needed in enumerate(self._needed) if not needed and i != trigger]

    def arm(self) -> None:
        """Begin a round: operations without dependencies fire."""
        self._missing = self._needed.copy()
        self.fired.clear()
        self.done.clear()
        self.queue.clear()
        for i in self._first:
            self.fire(i)

    def fire(self, i: int) -> None:
        """Fire an operation, unless it has."""
        if i not in self.fired:
            self.fired.add(i)
            self.queue.append(i)

    def finish(self, i: int) -> None:
        """Note that an operation is done, and fire those that wait for no other."""
        self.done.add(i)
        for dependent in self._dependents[i]:
            self._missing[dependent] -= 1
            if self._missing[dependent] <= 0:
                self.fire(dependent)

    @property
    def over(self) -> bool:
        """Tell whether the last operations are done."""
        return self._last <= self.done
