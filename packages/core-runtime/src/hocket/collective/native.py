"""Channels over the transport's own non-blocking collectives: a lane, so an order of calls, for each segment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from hocket.collective.api import Channel, Outcome
from hocket.segment.segment import Segment
from hocket.transport.peer import Lane, Peer, Request

__all__ = ["AllreduceChannel", "BroadcastChannel", "NativeChannel"]


class _Completed(Request):
    """A transport's request whose result is the exchange's outcome."""

    __slots__ = ("_outcome", "_request")

    def __init__(self, request: Request, outcome: Outcome) -> None:
        self._request = request
        self._outcome = outcome

    def done(self) -> bool:
        return self._request.done()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        self._request.wait(timeout_s)
        return self._outcome

    @property
    def result(self) -> Outcome:
        return self._outcome


class NativeChannel(Channel):
    """A channel whose every exchange is one call of the transport, in which all ranks take part.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
    """

    def __init__(self, peer: Peer, segments: Sequence[Segment]) -> None:
        self._size = peer.size
        self._lanes = [peer.lane(segment.name, segment.wire_bytes) for segment in segments]

    @abstractmethod
    def _call(self, lane: Lane, segment: Segment) -> Request:
        """Start the transport's operation on a segment's buffers."""

    def start(self, segment: Segment, round: int) -> Request:
        request = self._call(self._lanes[segment.index], segment)
        return _Completed(request, Outcome(round, included=True, num_active=self._size))

    def flush(self) -> None:
        """Nothing outlives its request here."""

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept between rounds."""


class AllreduceChannel(NativeChannel):
    """Puts the sum of all ranks' `outgoing` into everyone's `incoming`."""

    def _call(self, lane: Lane, segment: Segment) -> Request:
        return lane.iallreduce(segment.outgoing_array, segment.incoming_array)


class BroadcastChannel(NativeChannel):
    """Puts the root's `outgoing` into everyone's `incoming`."""

    def __init__(self, peer: Peer, segments: Sequence[Segment], root: int) -> None:
        super().__init__(peer, segments)
        self._is_root = peer.rank == root
        self._root = root

    def _call(self, lane: Lane, segment: Segment) -> Request:
        if self._is_root:
            segment.incoming_array[...] = segment.outgoing_array
        return lane.ibroadcast(segment.incoming_array, self._root)
