"""What the threads of a rank tell each other with, and how another rank wakes a thread that sleeps.

A progress thread must answer within microseconds and cost nothing while there is nothing to do. Polling gives one
or the other (32 idle ranks that look every 0.1 ms burn 1.35 cores). A bell gives both: who sends a message rings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hocket.arrays import Array
    from hocket.transport.peer import Peer

__all__ = ["Connection", "Doorbell", "Event", "Ring"]


class Event(ABC):
    """Something that happens once: one thread of a rank sets it, others of the same rank wait for it."""

    @abstractmethod
    def set(self) -> None:
        """Let everybody go who waits, now and later."""

    @abstractmethod
    def wait(self, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        """Block until the event is set, without burning a core.

        Args:
            describe: says what is awaited and from whom; called for errors and reports only.
            timeout_s: seconds to wait at most; the peer's own `timeout_s` where None.

        Raises:
            ExchangeTimeoutError: not set in time; names this rank and carries what `describe` says.
        """


class Ring(NamedTuple):
    """Who rang, and what for.

    Attributes:
        key: as this rank gave it to `Doorbell.connect`.
        source: the ringing rank, numbered as in the peer of that connection.
        message, round: as it gave them to `Connection.ring`.
        data: the message itself, if it came with the ring; None if it comes on its own.
    """

    key: int
    source: int
    message: int
    round: int
    data: bytes | None


class Connection(ABC):
    """The way to the bells of a peer's ranks, and theirs to this one's.

    Attributes:
        largest_bytes: a message of up to so many bytes can come with a ring.
    """

    largest_bytes: int

    @abstractmethod
    def reaches(self, rank: int) -> bool:
        """Return whether `rank` hears this rank's rings."""

    @abstractmethod
    def hears(self, rank: int) -> bool:
        """Return whether this rank hears those of `rank`; if not, it has to poll."""

    def bell(self, rank: int) -> tuple[int, int] | None:
        """Return where a program may write rings for `rank` by itself: a descriptor, and the key there; or None."""
        return None

    @abstractmethod
    def ring(self, rank: int, message: int, round: int, data: bytes | None = None) -> bool:
        """Wake `rank`; never blocks, microseconds.

        A message that comes with the ring costs nothing more, where the transport's own cost a system call or two at
        either end; and to look for one that has not come is dear, as Open MPI gives the core to another rank then.

        Args:
            rank: whom, one that is reached.
            message: a number below 2**32 by which it knows what the ring is for.
            round: the same, below 2**63.
            data: the message itself; None where it has been sent before, on a lane.

        Returns:
            Whether it has rung. Not while the other has a thousand rings to hear before: ring again then.
        """


class Doorbell(ABC):
    """What one thread sleeps on until there is something to do.

    Attributes:
        hears_everything: whether it also rings when an operation of this rank ends, and no sooner, so that there
            is never a reason to poll. Elsewhere a ring means that a message is on its way, perhaps not yet here.
    """

    hears_everything: bool

    @abstractmethod
    def connect(self, peer: Peer, key: int) -> Connection:
        """Exchange bells with the peer's other ranks, each of which gives its own; collective.

        Args:
            peer: the ranks that will ring each other.
            key: what their rings are told apart by on this rank, from 0.
        """

    def serve(self, key: int, program: Array | None) -> None:  # noqa: B027 (a bell need not be able to)
        """Carry a program on in `wait`, without Python, and return only the rings that it has no use for.

        Args:
            key: of its connection.
            program: see `hocket.kernels.program`; None when it has ended.
        """

    @abstractmethod
    def ring(self) -> None:
        """Wake the sleeper, from another thread of this rank; never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> Sequence[Ring]:
        """Sleep until somebody rings or has rung since the last call, or until `timeout_s` have passed.

        Args:
            timeout_s: 0 to look only; None to sleep as long as it takes.

        Returns:
            Who rang, where the bell can tell; a ring of this rank's own has a key that was given to no connection.
            Empty where time is up, where it cannot tell, or where a program that it serves needs Python.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the bell back; others who ring it afterwards are not heard and not told."""
