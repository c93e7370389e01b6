"""What a process owes the other ranks, and does while it waits for something else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hocket.transport.progress import Advancing, Progress

__all__ = ["HostProgress", "SharedNetwork"]


class HostProgress:
    """The exchanges of this process that are not done: whoever waits for one advances them all.

    Other ranks need this rank's share of each, and may wait for them in another order.

    Args:
        move_messages: a look at the transport by which its messages go on; over shared memory nothing calls it.
    """

    def __init__(self, move_messages: Callable[[], object] = lambda: None) -> None:
        self._move_messages = move_messages
        self._unfinished: list[Advancing] = []
        self._messages = 0
        self._lock = threading.Lock()

    def count_messages(self, more: int) -> None:
        """Count messages that have begun and need this process's looks to go on, or, negative, have ended."""
        with self._lock:
            self._messages += more

    def move_messages(self) -> None:
        """Let the process's messages go on, if there are any."""
        if self._messages:
            self._move_messages()

    def add(self, exchange: Advancing) -> None:
        """Begin an exchange."""
        if not exchange.advance():
            self._unfinished.append(exchange)

    @property
    def busy(self) -> bool:
        """Whether anything is not done."""
        return bool(self._unfinished)

    def is_only(self, exchange: Advancing) -> bool:
        """Return whether nothing but `exchange` is not done, messages included."""
        return not self._messages and self._unfinished == [exchange]

    def advance(self) -> None:
        """Look once at everything that is not done."""
        if not self._unfinished:
            return
        # What advances may add others.
        looked_at, self._unfinished = self._unfinished, []
        try:
            looked_at = [exchange for exchange in looked_at if not exchange.advance()]
        finally:
            self._unfinished = looked_at + self._unfinished


class SharedNetwork(Progress):
    """The progress of a peer whose ranks are on several hosts.

    Args:
        held: the process's.
    """

    def __init__(self, held: HostProgress) -> None:
        self._held = held

    def owe(self, exchanges: Advancing) -> bool:
        self._held.add(exchanges)
        return True
