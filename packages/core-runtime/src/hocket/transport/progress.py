"""The unfinished operations of a rank, which whatever it waits for advances."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Advancing", "Progress"]


class Advancing(Protocol):
    """What other ranks cannot end without this one."""

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether the others need nothing more."""


class Progress:
    """The operations of a rank that are not done: whoever waits for one advances them all.

    Other ranks need this rank's share of each, and may wait for them in another order. A rank has one, in the world and
    all of its groups. On `virtual` it stays empty: the simulation ends what is under way.

    Args:
        move_messages: a look at the transport by which its messages go on; where None, they go on by themselves.
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
        """Keep an operation that its caller has dropped until it is done; for `__del__`, so that it does no more."""
        self._dropped.append(operation)

    def begin_message(self) -> None:
        """Note that a message is under way that needs looks to go on, and look at one of those that were dropped."""
        self._count_messages(1)
        if self._dropped:
            self._if_alone(self._look_at_a_dropped_one)

    def end_message(self) -> None:
        """Note that a message is under way no longer."""
        self._count_messages(-1)

    def move_messages(self) -> None:
        """Let the rank's messages go on, if there are any."""
        if self._messages and self._move_messages is not None:
            self._move_messages()

    @property
    def busy(self) -> bool:
        """Whether anything is not done."""
        return bool(self._unfinished or self._dropped)

    def is_only(self, operation: Advancing) -> bool:
        """Return whether nothing but `operation` is not done, messages included."""
        return not self._messages and list(self._unfinished) == [id(operation)]

    def advance(self) -> None:
        """Look once at everything that is not done, and of what was dropped at one.

        Does nothing where another thread is about it, or called from within it.

        Raises:
            TransportError: an operation failed.
        """
        if self.busy:
            self._if_alone(self._look)

    def _if_alone(self, look: Callable[[], None]) -> None:
        """Call `look` unless somebody is about it."""
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
        """Look at the next in turn: looks at one let all messages go on."""
        if self._dropped:
            operation = self._dropped.popleft()
            if not operation.advance():
                self._dropped.append(operation)

    def _count_messages(self, more: int) -> None:
        with self._counting:
            self._messages += more
