"""Collectives in which one rank, the root, differs from the others: its value everywhere, or the mean on it alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.collective.api import (
    Channel,
    Choices,
    Collective,
    CollectiveTraits,
    Cost,
    Ends,
    Outcome,
)

if TYPE_CHECKING:
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.topology import Topology
    from hocket.transport.lane import Lane
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request


@dataclass(frozen=True)
class _Rooted(Collective):
    """A collective with a root rank.

    Attributes:
        root: a rank of the exchange's scope, from 0; null for the segment's leader, the rank that takes part in
            exchanges over `leaders`.

    Raises:
        ValueError: `root` is below 0.
    """

    root: int | None = None

    def __post_init__(self) -> None:
        if self.root is not None and self.root < 0:
            raise ValueError(f"root must be 0 or more, not {self.root}")

    def _roots(self, segments: Sequence[Segment], size: int, choices: Choices) -> dict[int, int]:
        """Return each segment's root among `size` ranks, by its index."""
        return {
            segment.index: choices.leader(size, segment.index) if self.root is None else self.root
            for segment in segments
        }

    def check_size(self, size: int) -> None:
        if self.root is not None and self.root >= size:
            raise ValueError(
                f"root: there is no rank {self.root} in a scope of {size} ranks: give 0 to {size - 1}, or null"
            )


@dataclass(frozen=True)
class Broadcast(_Rooted):
    """A broadcast: every rank ends with the value of `root`, or else of the scope's leader."""

    @property
    def traits(self) -> CollectiveTraits:
        return CollectiveTraits(Ends.COPY, root=self.root, on_devices=True)

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        return _BroadcastChannel(peer, segments, self._roots(segments, peer.size, choices))

    def in_place(self, choices: Choices, shared: bool) -> bool:
        return True

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return (p - 1) / p n bytes: p - 1 copies are sent, averaged over p ranks."""
        return Cost((size - 1) / size * message_bytes, network.broadcast_seconds(message_bytes, size))


@dataclass(frozen=True)
class Reduce(_Rooted):
    """A reduction: one rank, the root, ends with the mean, and the others with their own values.

    The root divides, as the others keep their values whole.

    The first step of a hierarchy: `reduce` over groups, an exchange of the leaders among themselves, then `broadcast`
    over groups. In place of an allreduce over groups it halves what a member sends, where only the leaders use the
    groups' mean. Groups of different sizes then weigh the same; an allreduce over groups weighs them by their ranks.
    """

    @property
    def traits(self) -> CollectiveTraits:
        return CollectiveTraits(Ends.ROOT, root=self.root, on_devices=True)

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        return _ReduceChannel(peer, segments, self._roots(segments, peer.size, choices))

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return (p - 1) / p n bytes: every rank but the root sends once, up a tree."""
        return Cost((size - 1) / size * message_bytes, network.reduce_seconds(message_bytes, size))


class _RootedChannel(Channel):
    """A channel that calls the transport once for each segment.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        roots: the root's rank by a segment's index.
    """

    def __init__(self, peer: Peer, segments: Sequence[Segment], roots: dict[int, int]) -> None:
        lanes = {segment.index: peer.lane(segment.name, segment.wire_bytes) for segment in segments}
        super().__init__(segments, lanes)
        self._rank, self._size = peer.rank, peer.size
        self._roots = roots

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        outcome = Outcome(round, included=True, num_active=self._size)
        return self._call(self._lanes[segment.index], segment, self._roots[segment.index]).then(
            lambda _: outcome
        )

    @abstractmethod
    def _call(self, lane: Lane, segment: Segment, root: int) -> Request:
        """Start the transport's operation on a segment's buffers."""


class _BroadcastChannel(_RootedChannel):
    """A channel that copies a root's `outgoing` into every rank's `incoming`."""

    def _call(self, lane: Lane, segment: Segment, root: int) -> Request:
        if root == self._rank and segment.incoming is not segment.outgoing:
            segment.incoming_array[...] = segment.outgoing_array
        return lane.ibroadcast(segment.incoming_array, root)


class _ReduceChannel(_RootedChannel):
    """A channel that puts the mean of all `outgoing` into the root's `incoming`; others get their own `outgoing`."""

    def _call(self, lane: Lane, segment: Segment, root: int) -> Request:
        outgoing, incoming = segment.outgoing_array, segment.incoming_array
        if root != self._rank:
            incoming[...] = outgoing
            return lane.ireduce(outgoing, None, root)

        def divide(_: object) -> None:
            incoming[...] *= 1 / self._size

        return lane.ireduce(outgoing, incoming, root).then(divide)
