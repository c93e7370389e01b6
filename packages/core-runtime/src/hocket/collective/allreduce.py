"""The sum of all ranks' contributions on every rank, by the transport's own allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hocket.collective.api import Channel, Collective

if TYPE_CHECKING:
    from hocket.progress import ProgressEngine
    from hocket.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = ["Allreduce"]


@dataclass(frozen=True)
class Allreduce(Collective):
    """Every rank ends with the mean, the same bits everywhere."""

    slots: ClassVar[frozenset[str]] = frozenset({"gradients", "parameters"})
    equal_result: ClassVar[bool] = True

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.native import AllreduceChannel

        return AllreduceChannel(peer, segments)

    def contribution_scale(self, size: int) -> float:
        return 1 / size

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return 2 (p - 1) / p n: what a ring sends, which no algorithm undercuts (Patarasuk and Yuan 2009)."""
        return 2 * (size - 1) / size * message_bytes

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        return network.allreduce_seconds(message_bytes, size)
