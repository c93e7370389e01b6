"""What a transport offers: a `Peer` in a group of ranks, its `Lane`s, and the `Request`s they return.

The contract, which `hocket.testing.transport` checks on every transport:

- Nothing here blocks but `Request.wait`, `Peer.lane`, `Peer.group` and `Peer.allgather_bytes`; all four give up
  after a timeout. `lane`, `group`, `allgather_bytes` and `close` are collective: all ranks of the peer call them,
  in the same order.
- Messages are matched by (lane, source, round): never by the order of calls on different lanes. Two messages
  between the same pair with the same lane and round are matched in the order in which they were sent.
- Native collectives are matched by their order within one lane, which is why each (exchange, segment) has a lane
  of its own: gradients become ready in another order on another rank.
- A buffer belongs to the transport from the call until the request is done. It is a C-contiguous NumPy array in
  host memory, 0 elements included.
- `iallreduce` gives every rank the same bits, in place (`receive` is `send`) as well.
- A request that is dropped before it is done is still carried out.
- A rank may have more threads than one: `Peer.spawn` starts them, an `Event` tells one of them what another has
  done, and a `Doorbell` is what a progress thread sleeps on until a message comes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.errors import TransportError

if TYPE_CHECKING:
    from hocket.transport.signals import Doorbell, Event
    from hocket.transport.threads import ThreadRequest

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "NOT_TOGETHER",
    "Advancing",
    "Array",
    "Lane",
    "Mixer",
    "Peer",
    "Request",
    "Terms",
    "is_same_memory",
]

Array = NDArray[Any]


class Terms(NamedTuple):
    """What each rank of a lane adds up, in the order in which it is added: a matrix by its rows, without its zeros.

    Attributes:
        starts: int64 [ranks + 1]; rank i has the terms from starts[i] up to starts[i + 1], at least one.
        sources: int64 [terms], whose vector it is.
        weights: float64 [terms], rounded to the vectors' dtype before they are used.
    """

    starts: Array
    sources: Array
    weights: Array


#: What to look for where ranks meet that do different things; the end of a message.
NOT_TOGETHER = (
    "did one leave its loop early, skip a step, or begin with another model, other data or another strategy?"
)

#: How long a wait lasts, in seconds, before it raises, where the caller does not say.
DEFAULT_TIMEOUT_S = 300.0


class Request(ABC):
    """The future of anything asynchronous."""

    @abstractmethod
    def done(self) -> bool:
        """Advance the transport and return whether the operation has finished. Never blocks.

        Raises:
            TransportError: the operation failed.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the operation has finished, without burning a core, and return `result`.

        Args:
            timeout_s: seconds to wait at most; the peer's own `timeout_s` where None.

        Raises:
            ExchangeTimeoutError: not finished in time; names this rank, the lane and whom it waited for.
            TransportError: the operation failed.
        """

    @property
    def result(self) -> Any:
        """What the operation gave, once it is done; None for plain messages."""
        return None

    def withdraw(self) -> None:
        """Give up a receive for which no message has come; its buffer is the caller's again. Never blocks.

        A message that comes all the same is lost, or is met by a later receive for the same round.

        Raises:
            TypeError: this is no receive.
        """
        raise TypeError(f"{type(self).__name__}: only a receive can be withdrawn")


class Advancing(Protocol):
    """What other ranks cannot end without this one."""

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether the others need nothing more."""


class Mixer(ABC):
    """Weighted sums of vectors that the ranks of a lane give, over and over; see `Lane.mixer`."""

    @abstractmethod
    def start(self, terms: Sequence[Terms]) -> Request:
        """Put every rank's sums where they go.

        Only ranks wait for each other that are connected by what they add up, which may differ from round to round:
        every rank of the lane calls this once a round.

        Args:
            terms: for each of the places, the same on every rank of the lane. Results have the bits of
                `reduction.weighted_sum`: products are rounded, and added in their order.

        Returns:
            A request, whose result is the connected ranks that gave NaN or Inf, as a tuple, and maybe others that one
            of these ranks has met.
        """


class Lane(ABC):
    """A matching space of its own within a peer's group: one per (exchange, segment).

    `rank` and `size` are the peer's.
    """

    name: str
    rank: int
    size: int

    @abstractmethod
    def isend(self, data: Array, to: int, round: int) -> Request:
        """Send `data` to rank `to`; done when the buffer may be changed again."""

    @abstractmethod
    def irecv(self, data: Array, source: int, round: int) -> Request:
        """Receive into `data` what `source` sent on this lane for this round; as many bytes as were sent."""

    @abstractmethod
    def iallreduce(self, send: Array, receive: Array) -> Request:
        """Put the elementwise sum of all ranks' `send` into everyone's `receive`, the same bits on every rank.

        Args:
            send: float32, float64, int32 or int64; the same shape and dtype on every rank.
            receive: like `send`; the same memory, or memory that does not overlap it, on every rank alike.
        """

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        """Prepare weighted sums of vectors that the ranks give, if this lane has a better way than messages.

        Args:
            places: one or more pairs (what this rank gives, where its sum goes), which are done together: float32 or
                float64, all of one dtype, in memory of `Peer.allocate`, the same on every rank of the lane. The two are
                the same memory, or memory that does not overlap it, on every rank alike.

        Returns:
            None, on all ranks alike, if messages are the way.
        """
        return None

    @abstractmethod
    def ibroadcast(self, data: Array, root: int) -> Request:
        """Copy `data` of rank `root` into everyone's `data`."""

    @abstractmethod
    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        """Put the elementwise sum of all ranks' `send` into the `receive` of rank `root`.

        Args:
            send: float32, float64, int32 or int64; the same shape and dtype on every rank.
            receive: on `root` like `send`, the same memory or memory that does not overlap it; not looked at elsewhere.
            root: a rank of the lane.
        """

    @abstractmethod
    def iallgather(self, send: Array, receive: Array) -> Request:
        """Gather every rank's message, of lengths that may differ between ranks and calls.

        Args:
            send: uint8 [n], of at most `capacity` bytes.
            receive: uint8 [size, capacity], another buffer; the same capacity on every rank. What it holds behind a
                message is left undefined.

        Returns:
            A request whose result is a list of `size` views into `receive`: each rank's message with its own
            length, by rank, this rank's included.

        Raises:
            TransportError: the message is longer than `capacity`, or the buffers are none of these.
        """

    @abstractmethod
    def ibarrier(self) -> Request:
        """Done when every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Give the lane back; collective, and only after its requests are done or withdrawn."""


class Peer(ABC):
    """This rank's endpoint in a group of ranks.

    Attributes:
        rank: this rank, 0 <= rank < size.
        size: how many ranks the group has.
        timeout_s: how long waits last that do not say, in seconds.
        shares_process: whether all ranks are threads of this process.
    """

    transport: str
    shares_process: bool = False
    rank: int
    size: int
    timeout_s: float = DEFAULT_TIMEOUT_S
    _threads: Sequence[ThreadRequest] = ()

    @property
    def host_name(self) -> str:
        """The name of the host that this rank runs on; ranks with the same name can share memory."""
        return socket.gethostname()

    @abstractmethod
    def lane(self, name: str, capacity_bytes: int = 0) -> Lane:
        """Open a lane; collective.

        Args:
            name: stands in messages, for instance `gradients.0[3]`.
            capacity_bytes: the largest buffer that native collectives will be given again and again, so that the
                transport can prepare for it; others work too.
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
        """Return every rank's `data`, by rank; collective. For start-up and small control messages.

        Args:
            data: this rank's.
            timeout_s: seconds to wait at most.
            what: stands in reports; where it is not `allgather` ranks may never come, and a rank that can tell so
                raises ExchangeTimeoutError before the time is over.
        """

    def gather(self, value: Any, timeout_s: float | None = None, what: str = "allgather") -> list[Any]:
        """Return every rank's `value`, which JSON can hold, by rank; collective, as `allgather_bytes`."""
        told = self.allgather_bytes(json.dumps(value).encode(), timeout_s, what)
        return [json.loads(data) for data in told]

    @abstractmethod
    def now(self) -> float:
        """This rank's clock, in seconds: the wall's, or the virtual one."""

    def elapse(self, seconds: float) -> None:  # noqa: B027 (nothing to do on a real clock)
        """Charge computing time to a virtual clock; nothing where the clock is the wall's."""

    def sleep(self, seconds: float) -> None:
        """Hold this rank up for `seconds`, 0 or more, without using a core; as `elapse` on a virtual clock.

        Nothing is advanced meanwhile but by a progress thread, as where the rank computed.
        """
        time.sleep(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> bool:
        """Have `call()` run when `seconds` have passed on a virtual clock; it may start operations, not wait.

        Returns:
            Whether it will run. Not where the clock is the wall's: there one has to look at it.
        """
        return False

    def allocate(self, nbytes: int) -> Array:
        """Return `nbytes` bytes of host memory for a segment, as uint8, 64-byte aligned.

        A transport whose ranks can share memory returns shared memory here, which makes native collectives on it
        faster: collective for that reason, the same sizes in the same order on all ranks.
        """
        memory = np.empty(nbytes + 64, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]

    def works_in_place(self, data: Array) -> bool:
        """Return whether collectives on `data` are best made in place, on all ranks alike.

        Where the ranks of a host share memory they write each other's results: in place that is less to write and
        half the memory. Where messages are sent MPI's allreduce is up to four times slower in place.

        Args:
            data: an array of `allocate`.
        """
        return False

    def owe(self, exchanges: Advancing) -> bool:
        """Advance in every wait of this process what begins exchanges in turn, until the other ranks need no more.

        Returns:
            Whether it will be advanced: only where exchanges that are under way at once share the network between
            hosts, and are all late. Elsewhere the caller begins them all.
        """
        return False

    def share(self, nbytes: int) -> Sequence[Array] | None:
        """Return memory that all ranks of this peer read and write; collective, the same sizes on all ranks.

        Returns:
            For each rank `nbytes` zeroed bytes, as uint8, 64-byte aligned; None, on all ranks alike, where ranks share
            no memory. What one writes others see in order: ranks of processors that do not promise it share none.
        """
        return None

    def spawn(self, name: str, call: Callable[[], Any], stop: Callable[[], None] | None = None) -> Request:
        """Run `call()` in another thread of this rank, which has to end before the peer is closed.

        Args:
            name: its role on this rank, for reports.
            call: what it runs; what it raises reaches whoever waits for the request.
            stop: makes `call` return soon. Called when the process ends, so that no thread uses the transport after
                its end; without it `call` has to see to that.

        Returns:
            Done when `call` has returned; its result is what it returned.
        """
        from hocket.transport.threads import ThreadRequest

        thread = ThreadRequest(self, name, call, stop)
        self._threads = [*self._threads, thread]
        return thread

    def event(self) -> Event:
        """Return an event that one thread of this rank sets and others wait for."""
        from hocket.transport.threads import ThreadEvent

        return ThreadEvent(self)

    def doorbell(self) -> Doorbell:
        """Return a bell that other ranks can ring once it is connected to theirs, for one thread to sleep on."""
        from hocket.transport.host.doorbell import HostDoorbell

        return HostDoorbell()

    def _check_threads_ended(self) -> None:
        """Raise TransportError if a thread of `spawn` still runs; `close` begins with it."""
        running = [thread.name for thread in self._threads if not thread.done()]
        if running:
            raise TransportError(
                f"rank {self.rank}: the peer was closed before its threads: {', '.join(running)}"
            )

    def note_waiting(self, what: str, lane: str) -> None:  # noqa: B027 (nothing to do where nobody asks)
        """Show the other ranks that this one waits, in `lane` for `what`; a microsecond."""

    def note_computing(self) -> None:  # noqa: B027 (nothing to do where nobody asks)
        """Show the other ranks that this one computes again; a microsecond."""

    def describe_waiting(self) -> str:
        """Say what is known of the other ranks, for a stall report: which computes, waits or is gone."""
        return ""

    def report_progress(self, step: int) -> None:  # noqa: B027 (nothing to do where nobody asks)
        """Note how many steps this rank has ended, for the other ranks' stall reports; a microsecond."""

    def check_lost(self) -> None:  # noqa: B027 (nothing to do where nobody can tell)
        """Look whether all ranks of the job still live; what waits for no request calls it now and then.

        Raises:
            PeerLostError: one has died; names it.
        """

    def kill(self) -> NoReturn:
        """End this rank at once and without a word, as a crash does: what fault injection needs.

        Raises:
            RankKilledError: on a virtual rank, then and at whatever it does next with the transport.
        """
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    @abstractmethod
    def abort(self, message: str, code: int = 1) -> None:
        """Print `message` once and end the whole job with exit status `code`; does not return on `mpi`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the peer holds; collective."""

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def is_same_memory(one: Array, other: Array) -> bool:
    """Return whether two arrays, contiguous and of the same shape and dtype, are the same memory, if any."""
    return one.nbytes > 0 and one.__array_interface__["data"][0] == other.__array_interface__["data"][0]
