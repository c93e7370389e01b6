"""One rank's value on every rank."""

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

__all__ = ["Broadcast"]


@dataclass(frozen=True)
class Broadcast(Collective):
    """Every rank ends with the value of `root`.

    Attributes:
        root: a rank of the exchange's scope, from 0.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"parameters"})
    equal_result: ClassVar[bool] = True

    root: int = 0

    def __post_init__(self) -> None:
        if self.root < 0:
            raise ValueError(f"root must be 0 or more, not {self.root}")

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.native import BroadcastChannel

        return BroadcastChannel(peer, segments, self.root)

    def contribution_scale(self, size: int) -> float:
        return 1.0

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return (p - 1) / p n: p - 1 copies are sent, in a tree by as many ranks."""
        return (size - 1) / size * message_bytes

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        return network.broadcast_seconds(message_bytes, size)
