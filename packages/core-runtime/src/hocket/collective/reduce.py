"""The mean of all ranks' values on one of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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

__all__ = ["Reduce"]


@dataclass(frozen=True)
class Reduce(Collective):
    """One rank, the root, ends with the mean, and the others with what they had.

    The first step of a hierarchy: `reduce` over groups, an exchange of the leaders among themselves, then `broadcast`
    over groups. In place of an allreduce over groups it halves what a member sends, where only the leaders use the
    groups' mean. Groups of different sizes then weigh the same; an allreduce over groups weighs them by their ranks.

    Attributes:
        root: a rank of the exchange's scope, from 0; null for the rank that leads the segment, which in a group is
            the one that takes part in exchanges over `leaders`.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"gradients", "parameters"})
    carries_messages: ClassVar[bool] = False

    root: int | None = None

    def __post_init__(self) -> None:
        if self.root is not None and self.root < 0:
            raise ValueError(f"root must be 0 or more, not {self.root}")

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, exchange: Exchange
    ) -> Channel:
        from hocket.collective.native import ReduceChannel

        def root_of(segment: int) -> int:
            return exchange.over.leader(peer.size, segment) if self.root is None else self.root

        return ReduceChannel(peer, segments, root_of)

    def contribution_scale(self, size: float) -> float:
        """Return 1: the root divides, as the others keep their values whole."""
        return 1.0

    def results(self, values: Sequence[Hashable], leader: int) -> list[Hashable]:
        results = list(values)
        results[leader if self.root is None else self.root] = (self, tuple(values))
        return results

    def check_size(self, size: int) -> None:
        if self.root is not None and self.root >= size:
            raise ValueError(
                f"root: {self.root} is no rank of a scope of {size}: give 0 to {size - 1}, or null"
            )

    def bytes_per_round(self, message_bytes: float, size: int, topology: Topology | None) -> float:
        """Return (p - 1) / p n: every rank but the root sends once, up a tree."""
        return (size - 1) / size * message_bytes

    def seconds_per_round(
        self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel
    ) -> float:
        return network.reduce_seconds(message_bytes, size)
