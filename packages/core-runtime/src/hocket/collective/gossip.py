"""Gossip: every rank averages with the few that the topology names, in this round and for this segment.

Source: Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms" (2006); Lian et al., "Can Decentralized
Algorithms Outperform Centralized Algorithms?" (2017) for training by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, ClassVar

from hocket.collective.api import Channel, Collective

if TYPE_CHECKING:
    from hocket.progress import ProgressEngine
    from hocket.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = ["Gossip"]


@dataclass(frozen=True)
class Gossip(Collective):
    """x_i becomes the sum over j of W[i, j] x_j, W being the mixing matrix of the round and the segment.

    With a doubly stochastic W the mean over ranks stays what it was, and repeated rounds lead everyone to it.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"gradients", "parameters"})
    needs_topology: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.neighbour_exchange import GossipChannel

        assert exchange.topology is not None  # the rules of composition see to it
        return GossipChannel(peer, segments, exchange.topology)

    def contribution_scale(self, size: int) -> float:
        return 1.0

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return the mean over ranks of the number of ranks that one sends to in the first round, times n."""
        return _mean_degree(topology, size) * message_bytes

    def channel_bytes(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return n for each rank that one hears from at a time: the most of any rank, in the first round."""
        assert topology is not None
        return message_bytes * max(len(topology.neighbours(r, size, 0, 0).receive_from) for r in range(size))

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        """Return the time in which a rank's link sends its messages, one after the other, and the last arrives."""
        return network.latency_s + network.link_seconds(_mean_degree(topology, size) * message_bytes)


def _mean_degree(topology: Topology | None, size: int) -> float:
    assert topology is not None
    return mean(len(topology.neighbours(rank, size, 0, 0).send_to) for rank in range(size))
