"""Channels over the transport's own non-blocking collectives: a lane, so an order of calls, for each segment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hocket.arrays import Array
from hocket.collective.api import Channel, Outcome
from hocket.collective.packing import Packing
from hocket.segment.segment import Segment
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["AllreduceChannel", "BroadcastChannel", "NativeChannel", "ReduceChannel"]


class NativeChannel(Channel):
    """A channel whose every exchange is one call of the transport, in which all ranks take part.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
    """

    def __init__(self, peer: Peer, segments: Sequence[Segment]) -> None:
        self._rank, self._size = peer.rank, peer.size
        self._lanes = {segment.index: peer.lane(segment.name, segment.wire_bytes) for segment in segments}

    @abstractmethod
    def _call(self, lane: Lane, segment: Segment, round: int) -> Request:
        """Start the transport's operation on a segment's buffers."""

    def start(self, segment: Segment, round: int) -> Request:
        outcome = Outcome(round, included=True, num_active=self._size)
        return self._call(self._lanes[segment.index], segment, round).then(lambda _: outcome)

    def flush(self) -> None:
        """Nothing outlives its request here."""

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.packing is None else self.packing.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.packing is not None:
            self.packing.load_state_dict(state)


class AllreduceChannel(NativeChannel):
    """Puts the sum of all ranks' `outgoing` into everyone's `incoming`.

    Args:
        packing: whose messages are summed in compressed form; None where segments are, as they are.
    """

    def __init__(self, peer: Peer, segments: Sequence[Segment], packing: Packing | None = None) -> None:
        super().__init__(peer, segments)
        self.packing = packing
        self._sums: dict[int, Array] = {}

    def _call(self, lane: Lane, segment: Segment, round: int) -> Request:
        packing = self.packing
        if packing is None:
            return lane.iallreduce(segment.outgoing_array, segment.incoming_array)
        message = packing.pack(segment, round)
        total = self._sums.setdefault(segment.index, np.empty_like(message))

        def unpack(_: None) -> None:
            segment.incoming.zero_()
            packing.add(total, 1.0, segment, round)

        return lane.iallreduce(message, total).then(unpack)


class _RootedChannel(NativeChannel):
    """A channel in which one rank differs from the others.

    Args:
        root_of: the root's rank by a segment's index.
    """

    def __init__(self, peer: Peer, segments: Sequence[Segment], root_of: Callable[[int], int]) -> None:
        super().__init__(peer, segments)
        self._root_of = root_of


class BroadcastChannel(_RootedChannel):
    """Puts a root's `outgoing` into everyone's `incoming`."""

    def _call(self, lane: Lane, segment: Segment, round: int) -> Request:
        root = self._root_of(segment.index)
        if root == self._rank and segment.incoming is not segment.outgoing:
            segment.incoming_array[...] = segment.outgoing_array
        return lane.ibroadcast(segment.incoming_array, root)


class ReduceChannel(_RootedChannel):
    """Puts the mean of all ranks' `outgoing` into a root's `incoming`, and elsewhere the rank's own `outgoing`."""

    def _call(self, lane: Lane, segment: Segment, round: int) -> Request:
        root = self._root_of(segment.index)
        outgoing, incoming = segment.outgoing_array, segment.incoming_array
        if root != self._rank:
            incoming[...] = outgoing
            return lane.ireduce(outgoing, None, root)

        def divide(_: None) -> None:
            np.multiply(incoming, 1 / self._size, out=incoming)

        return lane.ireduce(outgoing, incoming, root).then(divide)
