"""The contract of a transport: a `Peer` in a group of ranks, its `Lane`s, and the `Request`s they return.

`hocket.testing.transport` checks on every transport:

- Nothing here blocks but `Request.wait`, `Peer.lane`, `Peer.group` and `Peer.allgather_bytes`; all four give up
  after a timeout. `lane`, `group`, `allgather_bytes`, `on_device` and `close` are collective: all ranks of the peer
  call them, in the same order.
- Messages are matched by (lane, source, round): never by the order of calls on different lanes. Two messages
  between the same pair with the same lane and round are matched in the order in which they were sent.
- Native collectives are matched by their order within one lane, which is why each (exchange, segment) has a lane
  of its own: gradients become ready in another order on another rank.
- A buffer belongs to the transport from the call until the request is done. It is C-contiguous, where `Peer.device`
  says (on "cpu" a NumPy array), 0 elements included.
- `iallreduce` gives every rank the same bits, in place (`receive` is `send`) as well.
- A request that is dropped before it is done is still carried out.

Besides lanes a peer has four parts, each with a plain default that a transport may replace: a `clock`, a `memory`,
`threads` and a `status`.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from hocket.arrays import Array
from hocket.transport.gathering import gather
from hocket.transport.lane import Lane
from hocket.transport.pending import Progress
from hocket.transport.status import Status
from hocket.transport.threads import Threads

__all__ = ["DEFAULT_TIMEOUT_S", "Clock", "Memory", "Peer", "gather"]

#: How long a wait lasts, in seconds, before it raises, where the caller does not say.
DEFAULT_TIMEOUT_S = 300.0


class Clock:
    """The clock of a rank: the wall's."""

    #: Returns the time, in seconds.
    now: Callable[[], float] = staticmethod(time.perf_counter)

    def elapse(self, seconds: float) -> None:
        """Charge computing time to a virtual clock; do nothing on the wall's."""

    def sleep(self, seconds: float) -> None:
        """Delay this rank by `seconds`, 0 or more, without using a core; as `elapse` on a virtual clock.

        Only a progress thread advances operations meanwhile, as during computing.
        """
        time.sleep(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> bool:
        """Run `call()` after `seconds` on a virtual clock; it may start operations, not wait.

        Returns:
            Whether it will run. It does not on the wall's clock, which the caller has to check.
        """
        return False


class Memory:
    """Host memory for buffers: this process's own."""

    @property
    def host_name(self) -> str:
        """Return the name of this rank's host; ranks with the same name can share memory."""
        return socket.gethostname()

    def allocate(self, nbytes: int) -> Array:
        """Return `nbytes` bytes of host memory for a segment, as uint8, 64-byte aligned.

        A transport whose ranks can share memory returns shared memory here, which makes native collectives on it
        faster: collective for that reason, the same sizes in the same order on all ranks.
        """
        memory = np.empty(nbytes + 64, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]

    def share(self, nbytes: int) -> Sequence[Array] | None:
        """Return memory that all ranks of the peer read and write; collective, the same sizes on all ranks.

        Returns:
            For each rank `nbytes` zeroed bytes, as uint8, 64-byte aligned; None, on all ranks alike, where ranks share
            no memory. Others see a rank's writes in order: on processors without this guarantee ranks share none.
        """
        return None

    def works_in_place(self, data: Array) -> bool:
        """Return whether collectives on `data` are faster in place, on all ranks alike.

        Where the ranks of a host share memory they write each other's results: in place they write less, and need half
        the memory. Over messages MPI's allreduce is up to four times slower in place.

        Args:
            data: an array of `allocate`.
        """
        return False


class Peer(ABC):
    """The endpoint of this rank in a group of ranks.

    Args:
        rank: this rank, 0 <= rank < size.
        size: number of ranks in the group.

    Attributes:
        transport: the transport's name.
        timeout_s: default timeout of waits, in seconds.
        device: the device of its lanes' buffers: "cpu" is host memory.
        ordered: whether all ranks have to begin the operations of all lanes of the device in the same order.
        clock: gives and passes time.
        memory: allocates segments.
        threads: this rank's threads.
        status: the states of the ranks, and the dead among them.
        progress: its unfinished operations.
        announce_leaving: on the endpoint of one session: announces that this rank has left it, and why; other ranks
            learn it a second later, in a wait.
    """

    transport: str
    rank: int
    size: int
    timeout_s: float = DEFAULT_TIMEOUT_S
    device: str = "cpu"
    ordered: bool = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.clock = Clock()
        self.memory = Memory()
        self.status = Status()
        self.threads = Threads(self)
        self.progress = Progress()
        self.announce_leaving: Callable[[str], None] = _ignore

    def begin_session(self) -> int:
        """Count a session that this rank is about to begin, and return its number, equal on all ranks."""
        return 0

    def session(self, number: int) -> Peer:
        """Return this rank's endpoint in session `number`, with operations apart from other sessions'; collective.

        A rank that has left a session by an error may begin the next one while others still wait in that one.
        """
        return self

    def leave_session(self, number: int, why: str) -> None:  # noqa: B027 (there may be nobody to tell)
        """Announce that this rank takes no part in session `number` any more; never blocks.

        Args:
            number: of `begin_session`.
            why: the end of a sentence on this rank, for the others' errors.
        """

    @abstractmethod
    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        """Open a lane; collective.

        Args:
            name: stands in messages, for instance `gradients.0[3]`.
            capacity_bytes: the largest buffer of frequent native collectives, which the transport prepares for; others
                work too.
        """

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Peer | None:
        """Return this rank's endpoint among `ranks`, in their order, or None if it is not among them; collective.

        Every rank of this peer calls it; disjoint groups may be made in one call, each rank naming its own.
        """

    @abstractmethod
    def allgather_bytes(
        self, data: bytes, timeout_s: float | None = None, what: str = "allgather"
    ) -> list[bytes]:
        """Return every rank's `data`, by rank, for start-up and small control messages; collective.

        Args:
            data: this rank's.
            timeout_s: seconds to wait at most.
            what: the call that gathers, which all ranks must make, and for reports more after a colon; if it is not
                `allgather`, ranks may never call this, and a rank that detects so raises ExchangeTimeoutError before
                the time is over.

        Raises:
            TransportError: the ranks make different calls; names the calls and their ranks.
        """

    def on_device(self, device: str) -> Peer | None:
        """Return the same ranks' endpoint for buffers on their `device`, for instance "cuda:0"; collective.

        Returns:
            None, on all ranks alike, where this transport has no lanes on such devices: the caller then copies to
            host memory and back.
        """
        return None

    @abstractmethod
    def abort(self, message: str, code: int = 1) -> None:
        """Print `message` once and end the whole job with exit status `code`; does not return on `mpi`."""

    @abstractmethod
    def close(self) -> None:
        """Close the peer; collective. It begins with `threads.check_ended`."""

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def _ignore(why: str) -> None:
    pass
