"""One rank's value on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from hocket.collective.api import Channel
from hocket.collective.rooted import RootedCollective

if TYPE_CHECKING:
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = ["Broadcast"]


@dataclass(frozen=True)
class Broadcast(RootedCollective):
    """Every rank ends with the value of one: of the scope's leader, or of `root`."""

    equal_result: ClassVar[bool] = True

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.native import BroadcastChannel

        return BroadcastChannel(peer, segments, partial(self.root_of, exchange, peer.size))

    def in_place(self, exchange: Exchange, shared: bool) -> bool:
        return True

    def results(self, values: Sequence[Hashable], leader: int) -> list[Hashable]:
        return [values[self.root_or(leader)]] * len(values)

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return (p - 1) / p n: p - 1 copies are sent, in a tree by as many ranks."""
        return (size - 1) / size * message_bytes

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        return network.broadcast_seconds(message_bytes, size)
