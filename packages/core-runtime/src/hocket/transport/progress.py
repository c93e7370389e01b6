"""The unfinished operations of a rank, which any of its waits advances."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Advancing", "Progress"]


class Advancing(Protocol):
    """An operation that other ranks wait for."""

    def advance(self) -> bool:
        """Advance without waiting; return whether other ranks need nothing more of it."""


class Progress:
    """The unfinished operations of a rank; a wait for one advances them all.

    Other ranks need this rank's share of each, and may wait for them in another order. A rank has one, in the world and
    all of its groups. On `virtual` it stays empty, as the simulation ends operations.

    Args:
        move_messages: a look at the transport that moves its messages; None if they move by themselves.
    """

    def __init__(self, move_messages: Callable[[], object] | None = None) -> None:
        self._move_messages = move_messages
        self._unfinished: dict[int, Advancing] = {}
        self._dropped: deque[Advancing] = deque()
        self._messages = 0
        self._counting = threading.Lock()
        # One thread advances at a time; a wait within what it advances does not.
        self._advancing = threading.Lock()

    def add(self, operation: Advancing) -> None:
        """Advance an operation in every wait, from now on until it is done."""
        if not operation.advance():
            self._unfinished[id(operation)] = operation

    def keep(self, operation: Advancing) -> None:
        """Keep an operation that its caller has dropped until it is done; cheap, as `__del__` calls it."""
        self._dropped.append(operation)

    def begin_message(self) -> None:
        """Note a message under way that needs looks to move, and look at one dropped operation."""
        self._count_messages(1)
        if self._dropped:
            self._if_alone(self._look_at_a_dropped_one)

    def end_message(self) -> None:
        """Note that a message is under way no longer."""
        self._count_messages(-1)

    def move_messages(self) -> None:
        """Move the rank's messages, if there are any."""
        if self._messages and self._move_messages is not None:
            self._move_messages()

    @property
    def busy(self) -> bool:
        """Tell whether any operation is not done."""
        return bool(self._unfinished or self._dropped)

    def is_only(self, operation: Advancing) -> bool:
        """Return whether `operation` is the only unfinished one, messages included."""
        return not self._messages and list(self._unfinished) == [id(operation)]

    def advance(self) -> None:
        """Look once at each unfinished operation, and at one dropped one.

        Does nothing if another thread does so, or if called from within.

        Raises:
            TransportError: an operation failed.
        """
        if self.busy:
            self._if_alone(self._look)

    def _if_alone(self, look: Callable[[], None]) -> None:
        """Call `look` unless it is being called."""
        if self._advancing.acquire(blocking=False):
            try:
                look()
            finally:
                self._advancing.release()

    def _look(self) -> None:
        for operation in list(self._unfinished.values()):  # what advances may add others
            if operation.advance():
                self._unfinished.pop(id(operation), None)
        self._look_at_a_dropped_one()

    def _look_at_a_dropped_one(self) -> None:
        """Look at the next dropped operation in turn, as a look at one moves all messages."""
        if self._dropped:
            operation = self._dropped.popleft()
            if not operation.advance():
                self._dropped.append(operation)

    def _count_messages(self, more: int) -> None:
        with self._counting:
            self._messages += more
