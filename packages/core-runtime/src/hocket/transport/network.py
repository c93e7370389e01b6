"""The cost of messages and of the usual collectives on a network, as pure functions.

The alpha-beta model: a message of n bytes takes latency + n / bandwidth. Collectives are charged with the
better of two well-known algorithms, as MPI libraries choose; some algorithms are charged by themselves.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005, sections 4 and 5; P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009,
for the ring; congestion between different pairs of ranks is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Cost:
    """The cost of an operation for a rank, on average over ranks.

    Attributes:
        bytes: number of bytes sent.
        seconds: time taken on an otherwise idle network.
        memory: bytes of receive buffers and state besides its operands.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    memory: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.seconds + other.seconds, self.memory + other.memory)


@dataclass(frozen=True)
class NetworkModel:
    """A network of full-duplex links, one per host, and a switch that is never the bottleneck.

    Virtual ranks have a host each.

    Attributes:
        latency_s: seconds from the moment a byte leaves the sender's link to its arrival, at least 0.
        bandwidth_bits_per_s: bits per second of each host's link, in each direction, more than 0.
        poll_s: cost of one call of `Request.done` for its caller, in seconds; more than 0, so that a loop that
            polls sees time pass.

    Raises:
        ValueError: a number outside its range.
    """

    latency_s: float = 20e-6
    bandwidth_bits_per_s: float = 10e9
    poll_s: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be finite and at least 0, not {self.latency_s}")
        if not self.bandwidth_bits_per_s > 0:
            raise ValueError(f"bandwidth_bits_per_s must be positive, not {self.bandwidth_bits_per_s}")
        if not 0 < self.poll_s < math.inf:
            raise ValueError(f"poll_s must be finite and positive, not {self.poll_s}")

    def link_seconds(self, nbytes: float) -> float:
        """Return the time that `nbytes` bytes occupy a link, in seconds."""
        return 8 * nbytes / self.bandwidth_bits_per_s

    def message_seconds(self, nbytes: float) -> float:
        """Return the time of a message of `nbytes` bytes between two idle links, in seconds."""
        return self.latency_s + self.link_seconds(nbytes)

    def allreduce_seconds(self, nbytes: float, size: int) -> float:
        """Return the time of an allreduce of `nbytes` bytes per rank among `size` ranks, in seconds.

        The better of the ring, 2 (p - 1) (latency + n / (p bandwidth)), and recursive doubling,
        ceil(log2 p) (latency + n / bandwidth). A barrier is an allreduce of 0 bytes.
        """
        ring = 2 * (size - 1) * (self.latency_s + self.link_seconds(nbytes) / size)
        return min(ring, _doublings(size) * self.message_seconds(nbytes))

    def broadcast_seconds(self, nbytes: float, size: int) -> float:
        """Return the time of a broadcast of `nbytes` bytes to `size` ranks, the root included, in seconds.

        The better of the binomial tree, ceil(log2 p) (latency + n / bandwidth), and scatter followed by a
        ring allgather, (ceil(log2 p) + p - 1) latency + 2 (p - 1) / p n / bandwidth.
        """
        tree = _doublings(size) * self.message_seconds(nbytes)
        scattered = (_doublings(size) + size - 1) * self.latency_s
        scattered += 2 * (size - 1) / size * self.link_seconds(nbytes)
        return min(tree, scattered)

    def allgather_seconds(self, nbytes: float, size: int) -> float:
        """Return the time of an allgather of `nbytes` bytes from each of `size` ranks, in seconds.

        Recursive doubling: ceil(log2 p) latency + (p - 1) n / bandwidth.
        """
        return _doublings(size) * self.latency_s + (size - 1) * self.link_seconds(nbytes)

    def allgatherv_seconds(self, nbytes: float, size: int) -> float:
        """Return the time of an allgather of messages of different lengths, in seconds: the lengths travel first.

        Args:
            nbytes: the longest message's, in bytes.
            size: number of ranks.
        """
        return self.allgather_seconds(_LENGTH_BYTES, size) + self.allgather_seconds(nbytes, size)

    def reduce_seconds(self, nbytes: float, size: int) -> float:
        """Return the time of a reduction of `nbytes` bytes per rank to one of `size` ranks, in seconds.

        The better of the binomial tree, ceil(log2 p) (latency + n / bandwidth), and reduce-scatter followed by a
        gather, 2 ceil(log2 p) latency + 2 (p - 1) / p n / bandwidth.
        """
        tree = _doublings(size) * self.message_seconds(nbytes)
        scattered = 2 * _doublings(size) * self.latency_s
        scattered += 2 * (size - 1) / size * self.link_seconds(nbytes)
        return min(tree, scattered)

    def ring_cost(self, nbytes: float, size: int) -> Cost:
        """Return the cost of a ring allreduce: shares go around once to be summed, once to be handed on.

        2 (p - 1) messages of n / p bytes, which no algorithm undercuts.
        """
        return Cost(
            2 * (size - 1) / size * nbytes,
            2 * (size - 1) * self.message_seconds(nbytes / size),
            nbytes / size,
        )

    def recursive_doubling_cost(self, nbytes: float, size: int) -> Cost:
        """Return the cost of an allreduce in which ranks exchange in pairs, stage by stage.

        The largest power of two c of ranks do, in log2 c stages; the other p - c hand their data to one of these
        before, and get the sum from it. The next stage's message may arrive while the last one's is added: 2 n of
        memory. With one other rank, no rank waits for its data and for the sum in turn: one latency less.
        """
        stages = size.bit_length() - 1
        core = 1 << stages
        messages = stages + 2 * (size > core)
        return Cost(
            (core * stages + 2 * (size - core)) / size * nbytes,
            (stages + min(size - core, 2)) * self.latency_s + messages * self.link_seconds(nbytes),
            2 * nbytes,
        )

    def rabenseifner_cost(self, nbytes: float, size: int) -> Cost:
        """Return the cost of an allreduce by recursive halving and doubling: a ring's bytes in 2 log2 c stages.

        It runs among the largest power of two c of ranks; the other p - c hand their data to one of these before, and
        get the sum from it. The next stage's message may arrive while the last one's is added: 2 n of memory.
        """
        stages = size.bit_length() - 1
        core = 1 << stages
        halves = 2 * (core - 1) / core * nbytes
        whole = 2 * (size > core)
        return Cost(
            (core * halves + 2 * (size - core) * nbytes) / size,
            (2 * stages + whole) * self.latency_s + self.link_seconds(halves + whole * nbytes),
            2 * nbytes,
        )

    def binomial_cost(self, nbytes: float, size: int) -> Cost:
        """Return the cost of an allreduce up a binomial tree and down again.

        Rank 0's link carries ceil(log2 p) messages each way, and floor(log2 p) hops are the most to any rank. The next
        stage's message may arrive while the last one's is added: 2 n of memory.
        """
        hops = size.bit_length() - 1
        return Cost(
            2 * (size - 1) / size * nbytes,
            2 * (hops * self.latency_s + _doublings(size) * self.link_seconds(nbytes)),
            2 * nbytes,
        )

    def star_cost(self, nbytes: float, size: int) -> Cost:
        """Return the cost of a star allreduce, whose centre's link carries every rank's message, in and then out."""
        return Cost(
            2 * (size - 1) / size * nbytes,
            2 * (self.latency_s + (size - 1) * self.link_seconds(nbytes)),
            (size - 1) / size * nbytes,
        )


def _doublings(size: int) -> int:
    """Return ceil(log2(size)) exactly, for any size >= 1."""
    return (size - 1).bit_length()
