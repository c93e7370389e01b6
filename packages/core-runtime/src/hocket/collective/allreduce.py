"""The sum of all ranks' contributions on every rank, by the transport's own allreduce or by a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from hocket.collective.algorithms import Native, RecursiveDoubling, Ring
from hocket.collective.api import Channel, Collective
from hocket.compressor.none import NoCompression

if TYPE_CHECKING:
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = ["Algorithm", "Allreduce"]


class Algorithm(StrEnum):
    """How the sum is formed."""

    NATIVE = "native"
    RECURSIVE_DOUBLING = "recursive_doubling"
    RING = "ring"


_COSTS = {
    Algorithm.NATIVE: Native(),
    Algorithm.RECURSIVE_DOUBLING: RecursiveDoubling(),
    Algorithm.RING: Ring(),
}


@dataclass(frozen=True)
class Allreduce(Collective):
    """Every rank ends with the mean, the same bits everywhere.

    Attributes:
        algorithm: `native` is the transport's own, and the fastest there is where ranks share memory. The others are
            schedules of messages, which add in an order of their own: `recursive_doubling` takes the fewest steps,
            `ring` sends the fewest bytes.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"gradients", "parameters"})
    equal_result: ClassVar[bool] = True

    algorithm: Algorithm = Algorithm.NATIVE

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.native import AllreduceChannel
        from hocket.collective.packing import packing_for
        from hocket.collective.scheduled import ScheduledAllreduceChannel
        from hocket.schedule import recursive_doubling_allreduce, ring_allreduce

        packing = packing_for(exchange.compressor, segments)
        if self.algorithm is Algorithm.NATIVE:
            return AllreduceChannel(peer, segments, packing)
        ring = self.algorithm is Algorithm.RING
        build = ring_allreduce if ring else recursive_doubling_allreduce
        return ScheduledAllreduceChannel(peer, segments, progress, build, packing)

    def in_place(self, exchange: Exchange, shared: bool) -> bool:
        # By messages MPI is up to four times slower so.
        return (
            shared and self.algorithm is Algorithm.NATIVE and isinstance(exchange.compressor, NoCompression)
        )

    def contribution_scale(self, size: float) -> float:
        return 1 / size

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        return _COSTS[self.algorithm].bytes_sent(message_bytes, size)

    def channel_bytes(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        return _COSTS[self.algorithm].staging_bytes(message_bytes, size)

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        return _COSTS[self.algorithm].seconds(message_bytes, size, network)
