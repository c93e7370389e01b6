"""The mean of all ranks' values on one of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hocket.collective.api import Channel
from hocket.collective.rooted import RootedCollective

if TYPE_CHECKING:
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = ["Reduce"]


@dataclass(frozen=True)
class Reduce(RootedCollective):
    """One rank, the root, ends with the mean, and the others with what they had.

    The root divides, as the others keep their values whole.

    The first step of a hierarchy: `reduce` over groups, an exchange of the leaders among themselves, then `broadcast`
    over groups. In place of an allreduce over groups it halves what a member sends, where only the leaders use the
    groups' mean. Groups of different sizes then weigh the same; an allreduce over groups weighs them by their ranks.
    """

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.native import ReduceChannel

        return ReduceChannel(peer, segments, partial(self.root_of, exchange, peer.size))

    def results(self, values: Sequence[Hashable], leader: int) -> list[Hashable]:
        results = list(values)
        results[self.root_or(leader)] = (self, tuple(values))
        return results

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return (p - 1) / p n: every rank but the root sends once, up a tree."""
        return (size - 1) / size * message_bytes

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        return network.reduce_seconds(message_bytes, size)
