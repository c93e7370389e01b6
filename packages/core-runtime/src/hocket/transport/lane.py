"""The messages and collectives of one exchange: a lane of its own within a group of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hocket.arrays import Array, Buffer, MixingRows
from hocket.transport.request import Request


class Mixer(ABC):
    """Repeated weighted sums of the vectors of a lane's ranks; see `Lane.mixer`."""

    @abstractmethod
    def start(self, rows: Sequence[MixingRows]) -> Request[tuple[int, ...]]:
        """Compute every rank's sums, in place.

        A rank waits only for ranks that its sums connect it with, directly or through others, which may differ from
        round to round. Every rank of the lane calls this once a round.

        Args:
            rows: for each of the places, the same on every rank of the lane. Results have the bits of
                `reduction.weighted_sum`: products are rounded, and added in their order.

        Returns:
            A request, whose result is a tuple of the connected ranks that gave NaN or Inf, and maybe of others that one
            of these has seen.
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
        """Send `data` to rank `to`; the request is done when the buffer may change again."""

    @abstractmethod
    def irecv(self, data: Array, source: int, round: int) -> Request:
        """Receive the message of `source` on this lane in this round into `data`, which has as many bytes."""

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        """Send to some ranks and receive from others in one operation, as ordered lanes need it.

        Args:
            sends: each buffer, and the rank that it goes to.
            receives: each buffer, and the rank that it comes from, with as many bytes as were sent.
            round: of all of them; messages match those of `isend` and `irecv`.

        Returns:
            A request that is done when all is received and the sent buffers may change again.
        """
        received = [self.irecv(data, source, round) for data, source in receives]
        return Request.all_of([*received, *(self.isend(data, to, round) for data, to in sends)])

    @abstractmethod
    def iallreduce(self, send: Array, receive: Array) -> Request:
        """Put the elementwise sum of all ranks' `send` into every rank's `receive`, with equal bits.

        Args:
            send: float32, float64, int32 or int64; the same shape and dtype on every rank.
            receive: like `send`; the same memory, or memory that does not overlap it, on every rank alike.
        """

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        """Prepare weighted sums of the ranks' vectors, if this lane has a faster way than messages.

        Args:
            places: one or more pairs (this rank's vector, the place of its sum), which are done together: float32 or
                float64, all of one dtype, in memory of `Memory.allocate`, the same on every rank of the lane. The two
                are the same memory, or memory that does not overlap it, on every rank alike.

        Returns:
            None, on all ranks alike, if messages are faster.
        """
        return None

    @abstractmethod
    def ibroadcast(self, data: Array, root: int) -> Request:
        """Copy `data` of rank `root` into every rank's `data`."""

    @abstractmethod
    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        """Put the elementwise sum of all ranks' `send` into the `receive` of rank `root`.

        Args:
            send: float32, float64, int32 or int64; the same shape and dtype on every rank.
            receive: on `root` like `send`, the same memory or memory that does not overlap it; not used on other ranks.
            root: a rank of the lane.
        """

    @abstractmethod
    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        """Gather every rank's message; lengths may differ between ranks and calls.

        Args:
            send: uint8 [n], of at most `capacity` bytes.
            receive: uint8 [size, capacity], another buffer; the same capacity on every rank. Its contents are undefined
                afterwards, except the messages that are views into it.

        Returns:
            A request whose result is a list of `size` arrays, for reading only: each rank's message with its own
            length, by rank, this rank's included. They are views into `receive`, or into memory that ranks share.

        Raises:
            TransportError: the message is longer than `capacity`, or the buffers are none of these.
        """

    @abstractmethod
    def ibarrier(self) -> Request:
        """Return a request that is done when every rank has called this."""

    @abstractmethod
    def close(self) -> None:
        """Close the lane; collective, and only after its requests are done or withdrawn."""
