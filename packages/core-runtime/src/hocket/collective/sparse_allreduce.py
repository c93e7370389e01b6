"""The sum of all ranks' compressed contributions on every rank, by one gather of their messages.

Source: Fang et al., "RedSync", section 2.3: one allgather of packed messages, and a sparse addition of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hocket.collective.api import Channel, Collective

if TYPE_CHECKING:
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.strategy.exchange import Exchange
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer

__all__ = ["SparseAllreduce"]


@dataclass(frozen=True)
class SparseAllreduce(Collective):
    """Every rank ends with the mean of what all ranks sent, the same bits everywhere.

    For messages that cannot be added in flight: sparse ones, or casts, which are so added in float32. Bytes and
    decompression grow with the number of ranks: dense messages are cheaper by allreduce from a few ranks on.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"gradients"})
    gathers: ClassVar[bool] = True
    equal_result: ClassVar[bool] = True

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.gathering import GatheringChannel
        from hocket.collective.packing import Packing

        return GatheringChannel(peer, segments, Packing(exchange.compressor, segments))

    def contribution_scale(self, size: float) -> float:
        return 1 / size

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return (p - 1) n: each message passes p - 1 links of a ring."""
        return (size - 1) * message_bytes

    def channel_bytes(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return p n, for every rank's message."""
        return size * message_bytes

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        return network.allgatherv_seconds(message_bytes, size)
