"""The messages and collectives of one exchange: a lane of its own within a group of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hocket.arrays import Array, Buffer, MixingRows
from hocket.transport.request import Request

__all__ = ["Lane", "Mixer"]


class Mixer(ABC):
    """Weighted sums of vectors that the ranks of a lane give, over and over; see `Lane.mixer`."""

    @abstractmethod
    def start(self, rows: Sequence[MixingRows]) -> Request:
        """Put every rank's sums where they go.

        Only ranks wait for each other that are connected by what they add up, which may differ from round to round:
        every rank of the lane calls this once a round.

        Args:
            rows: for each of the places, the same on every rank of the lane. Results have the bits of
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

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        """Send to some ranks and receive from others, as one operation: the messages of an ordered lane.

        Args:
            sends: each buffer, and the rank that it goes to.
            receives: each buffer, and the rank that it comes from, with as many bytes as were sent.
            round: of all of them; messages match those of `isend` and `irecv`.

        Returns:
            Done when all is received and the buffers that were sent may be changed again.
        """
        received = [self.irecv(data, source, round) for data, source in receives]
        return Request.all_of([*received, *(self.isend(data, to, round) for data, to in sends)])

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
                float64, all of one dtype, in memory of `Memory.allocate`, the same on every rank of the lane. The two
                are the same memory, or memory that does not overlap it, on every rank alike.

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
            receive: uint8 [size, capacity], another buffer; the same capacity on every rank. What it holds afterwards
                is left undefined, but for the messages that are views into it.

        Returns:
            A request whose result is a list of `size` arrays, to be read alone: each rank's message with its own
            length, by rank, this rank's included. They are views into `receive`, or into memory that ranks share.

        Raises:
            TransportError: the message is longer than `capacity`, or the buffers are none of these.
        """

    @abstractmethod
    def ibarrier(self) -> Request:
        """Done when every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Give the lane back; collective, and only after its requests are done or withdrawn."""
