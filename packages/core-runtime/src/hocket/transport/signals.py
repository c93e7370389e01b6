"""Signals between the threads of a rank, and wake-ups of a thread by other ranks.

A progress thread must answer within microseconds and cost nothing while idle. Polling gives one or the other: 32 idle
ranks that poll every 0.1 ms burn 1.35 cores. A `Wake` gives both: the sender of a message wakes its receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hocket.transport.gathering import Ranks


class Event(ABC):
    """An event that happens once: one thread of a rank sets it, others of the same rank wait for it."""

    @abstractmethod
    def set(self) -> None:
        """Release all current and later waits."""

    @abstractmethod
    def wait(self, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        """Block until the event is set, without burning a core.

        Args:
            describe: returns the awaited event and its source; called for errors and reports only.
            timeout_s: seconds to wait at most; the peer's own `timeout_s` where None.

        Raises:
            ExchangeTimeoutError: not set in time; names this rank and contains the result of `describe`.
        """


class Bell(NamedTuple):
    """A wake-up by another rank, or by another thread of this one.

    Attributes:
        key: as this rank gave it to `Wake.connect`; -1 from this rank's own threads.
        message: the number that the sender gave to `Bells.ring`.
        round: likewise.
    """

    key: int
    message: int
    round: int


class Bells:
    """The connection that wakes the other ranks of a peer; this one reaches none, so messages must be polled for."""

    def reaches(self, rank: int) -> bool:
        """Return whether `ring` wakes `rank`."""
        return False

    def hears(self, rank: int) -> bool:
        """Return whether `rank` can wake this one."""
        return False

    def ring(self, rank: int, message: int, round: int) -> bool:
        """Wake `rank`, which must be reached; never blocks, microseconds.

        Args:
            rank: the rank to wake.
            message, round: numbers for it, below 2**31 and 2**63.

        Returns:
            Whether it was done. If not, thousands of wake-ups are still unread there: try again later.
        """
        raise AssertionError(f"rank {rank} cannot be reached")


class Wake(ABC):
    """A wake-up: one thread sleeps until another thread, or another rank, rings.

    Attributes:
        hears_everything: whether it wakes whenever an operation of this rank ends, so that polling is never needed.
            Otherwise a ring says that a message is under way, and perhaps not here yet.
    """

    hears_everything: bool

    @abstractmethod
    def connect(self, peer: Ranks, key: int) -> Bells:
        """Let the peer's other ranks wake this thread, and return the connection to theirs; collective.

        Args:
            peer: the ranks that will wake each other.
            key: number of this connection among this rank's, from 0, which its rings carry.
        """

    @abstractmethod
    def ring(self) -> None:
        """Wake the sleeper, from another thread of this rank; never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> Sequence[Bell]:
        """Sleep until a ring since the last call, or for at most `timeout_s` seconds.

        Args:
            timeout_s: 0 to look only; None for no limit.

        Returns:
            The rings since the last call that carry numbers.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the wake-up; later rings are lost without an error."""
