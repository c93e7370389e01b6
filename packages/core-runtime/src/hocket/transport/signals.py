"""Signals between the threads of a rank, and wake-ups of a thread by other ranks.

A progress thread must answer within microseconds and cost nothing while there is nothing to do. Polling gives one
or the other: 32 idle ranks that poll every 0.1 ms burn 1.35 cores. A `Wake` gives both: the sender of a message wakes
its receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hocket.transport.gathering import Ranks

__all__ = ["Bells", "Event", "Bell", "Wake"]


class Event(ABC):
    """Something that happens once: one thread of a rank sets it, others of the same rank wait for it."""

    @abstractmethod
    def set(self) -> None:
        """Release all current and later waits."""

    @abstractmethod
    def wait(self, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        """Block until the event is set, without burning a core.

        Args:
            describe: says what is awaited and from whom; called for errors and reports only.
            timeout_s: seconds to wait at most; the peer's own `timeout_s` where None.

        Raises:
            ExchangeTimeoutError: not set in time; names this rank and carries what `describe` says.
        """


class Bell(NamedTuple):
    """One wake-up by another rank, or by another thread of this one.

    Attributes:
        key: as this rank gave it to `Wake.connect`; -1 from this rank's own threads.
        message: the number that the sender gave to `Bells.ring`.
        round: likewise.
    """

    key: int
    message: int
    round: int


class Bells:
    """The way to wake the other ranks of a peer; this one reaches nobody, so that messages must be polled for."""

    def reaches(self, rank: int) -> bool:
        """Return whether `ring` wakes `rank`."""
        return False

    def hears(self, rank: int) -> bool:
        """Return whether `rank` can wake this one."""
        return False

    def ring(self, rank: int, message: int, round: int) -> bool:
        """Wake `rank`, which is reached; never blocks, microseconds.

        Args:
            rank: the rank to wake.
            message, round: numbers that it is given, below 2**31 and 2**63.

        Returns:
            Whether that is done. If not, thousands of wake-ups are still unread there: try again later.
        """
        raise AssertionError(f"rank {rank} cannot be reached")


class Wake(ABC):
    """Puts one thread to sleep until there is something to do.

    Attributes:
        hears_everything: whether it wakes whenever an operation of this rank ends, so that polling is never needed.
            Elsewhere a ring says that a message is under way, and perhaps not here yet.
    """

    hears_everything: bool

    @abstractmethod
    def connect(self, peer: Ranks, key: int) -> Bells:
        """Let the peer's other ranks wake this thread, and return the way to wake theirs; collective.

        Args:
            peer: the ranks that will wake each other.
            key: tells this connection's rings from others on this rank, from 0.
        """

    @abstractmethod
    def ring(self) -> None:
        """Wake the sleeper, from another thread of this rank; never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> Sequence[Bell]:
        """Sleep until somebody rings or has rung since the last call, or until `timeout_s` have passed.

        Args:
            timeout_s: 0 to look only; None for no limit.

        Returns:
            The rings since the last call, where there are any to tell apart.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the wake-up; later rings are lost without an error."""
