"""What the algorithms of an allreduce cost, as pure functions.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), sec. 4;
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009), for the ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.transport.network import NetworkModel

__all__ = ["AlgorithmCost", "Native", "RecursiveDoubling", "Ring"]


class AlgorithmCost(ABC):
    """What an allreduce of `nbytes` bytes per rank costs among `size` ranks."""

    @abstractmethod
    def bytes_sent(self, nbytes: float, size: int) -> float:
        """Return the bytes that a rank sends, on average over ranks."""

    @abstractmethod
    def seconds(self, nbytes: float, size: int, network: NetworkModel) -> float:
        """Return how long it takes on an otherwise idle network, in seconds."""

    @abstractmethod
    def staging_bytes(self, nbytes: float, size: int) -> float:
        """Return the bytes that a rank receives into before it adds them."""


class Ring(AlgorithmCost):
    """Shares of the buffer go around a ring twice: summed up, then handed on."""

    def bytes_sent(self, nbytes: float, size: int) -> float:
        """Return 2 (p - 1) / p n, which no algorithm undercuts."""
        return 2 * (size - 1) / size * nbytes

    def seconds(self, nbytes: float, size: int, network: NetworkModel) -> float:
        """Return 2 (p - 1) times a share's message."""
        return 2 * (size - 1) * network.message_seconds(nbytes / size)

    def staging_bytes(self, nbytes: float, size: int) -> float:
        return nbytes / size


class Native(Ring):
    """The transport's own, counted as a ring's bytes in the better algorithm's time."""

    def seconds(self, nbytes: float, size: int, network: NetworkModel) -> float:
        return network.allreduce_seconds(nbytes, size)

    def staging_bytes(self, nbytes: float, size: int) -> float:
        return 0.0


class RecursiveDoubling(AlgorithmCost):
    """The largest power of two of ranks exchange in pairs, stage by stage; the rest hand their data to one before."""

    def bytes_sent(self, nbytes: float, size: int) -> float:
        """Return ((c log2 c) + 2 (p - c)) / p n, c being the largest power of two up to p."""
        core, stages = _core(size)
        return (core * stages + 2 * (size - core)) / size * nbytes

    def seconds(self, nbytes: float, size: int, network: NetworkModel) -> float:
        """Return log2 c messages, and two more where p is no power of two."""
        core, stages = _core(size)
        return (stages + 2 * (size > core)) * network.message_seconds(nbytes)

    def staging_bytes(self, nbytes: float, size: int) -> float:
        """Return 2 n: the next stage's message may come while the last one's is added."""
        return 2 * nbytes


def _core(size: int) -> tuple[int, int]:
    """Return the largest power of two up to `size`, and its logarithm."""
    stages = size.bit_length() - 1
    return 1 << stages, stages
