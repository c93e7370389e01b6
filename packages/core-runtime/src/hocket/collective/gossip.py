"""Gossip: every rank averages with the few that the topology names, in this round and for this segment.

Source: Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms" (2006); Lian et al., "Can Decentralized
Algorithms Outperform Centralized Algorithms?" (2017) for training by it; Kempe, Dobra, Gehrke, "Gossip-Based
Computation of Aggregate Information" (2003) for push-sum, and Assran et al., "Stochastic Gradient Push" (2019) for
training by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from hocket.collective.api import Channel, Collective
from hocket.compressor.none import NoCompression

if TYPE_CHECKING:
    from hocket.compressor.api import Compressor, SegmentShape
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = ["Gossip"]

# Topologies change from round to round; what a round costs is the mean over the first so many.
_ROUNDS_LOOKED_AT = 64


@dataclass(frozen=True)
class Gossip(Collective):
    """x_i becomes the sum over j of W[i, j] x_j, W being the mixing matrix of the round and the segment.

    With a doubly stochastic W the mean over ranks stays what it was, and repeated rounds lead everyone to it.
    Compressed parameters are mixed as x_i + sum over j of W[i, j] C(x_j) - C(x_i), which keeps the mean too.

    Attributes:
        push_sum: whether a weight travels with each segment, through the same W, from 1 on every rank. Values
            divided by it approach the mean where only W's columns sum to 1; the optimizer steps the values
            themselves. Where W is doubly stochastic weights stay 1, and it costs nothing.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"gradients", "parameters"})
    needs_topology: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    threadable: ClassVar[bool] = True

    push_sum: bool = False

    @property
    def pushes_weight(self) -> bool:
        return self.push_sum

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.neighbour_exchange import GossipChannel
        from hocket.collective.packing import packing_for

        assert exchange.topology is not None  # the rules of composition see to it
        packing = packing_for(exchange.compressor, segments)
        return GossipChannel(
            peer, segments, exchange.topology, packing, keeps_own=exchange.slot == "parameters"
        )

    def in_place(self, exchange: Exchange, shared: bool) -> bool:
        # Values are combined when all are sent; only the sum of compressed messages begins from nothing.
        return exchange.slot == "parameters" or isinstance(exchange.compressor, NoCompression)

    def contribution_scale(self, size: float) -> float:
        return 1.0

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return n times the number of ranks that one sends to, on average over ranks and rounds."""
        assert topology is not None
        return _degrees(topology, size)[0] * message_bytes

    def message_bytes(
        self, compressor: Compressor, shape: SegmentShape, size: int, network: NetworkModel
    ) -> float:
        """Return n: of the longest message where lengths differ, as receivers do not know them."""
        return (
            compressor.payload_bytes(shape) if compressor.equal_sizes else compressor.max_payload_bytes(shape)
        )

    def channel_bytes(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return n for each rank that one hears from at a time: the most of any rank."""
        assert topology is not None
        return message_bytes * _degrees(topology, size)[1]

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        """Return the time in which a rank's link sends its messages, one after the other, and the last arrives."""
        assert topology is not None
        return network.latency_s + network.link_seconds(_degrees(topology, size)[0] * message_bytes)


@lru_cache(maxsize=16)
def _degrees(topology: Topology, size: int) -> tuple[float, int]:
    """Return the mean number of ranks that one sends to, and the largest number that one hears from."""
    rounds = range(_ROUNDS_LOOKED_AT if size <= _ROUNDS_LOOKED_AT else 1)
    asked = [topology.neighbours(rank, size, round, 0) for round in rounds for rank in range(size)]
    sent = sum(len(neighbours.send_to) for neighbours in asked)
    return sent / len(asked), max(len(neighbours.receive_from) for neighbours in asked)
