"""A channel that brings every rank's message to every rank, which adds them up: allreduce for sparse messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hocket.arrays import Array
from hocket.collective.api import Channel, Outcome
from hocket.collective.packing import Packing
from hocket.segment.segment import Segment
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["GatheringChannel"]


class GatheringChannel(Channel):
    """Puts the sum of all ranks' messages into everyone's `incoming`, the same bits on every rank.

    Messages are added in the order of their ranks. They may differ in length, and be as short as nothing.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        packing: gives the messages their form.
    """

    def __init__(self, peer: Peer, segments: Sequence[Segment], packing: Packing) -> None:
        self.packing: Packing = packing
        self._size = peer.size
        self._lanes: dict[int, Lane] = {segment.index: peer.lane(segment.name) for segment in segments}
        self._received = {
            segment.index: np.empty((peer.size, packing.capacity_bytes(segment)), np.uint8)
            for segment in segments
        }

    def start(self, segment: Segment, round: int) -> Request:
        payload = self.packing.pack(segment, round)
        raw = payload.reshape(-1).view(np.uint8)
        request = self._lanes[segment.index].iallgather(raw, self._received[segment.index])
        outcome = Outcome(round, included=True, num_active=self._size)
        return _Adding(request, self.packing, payload.dtype, segment, outcome)

    def flush(self) -> None:
        """Nothing outlives its request here."""

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        return self.packing.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.packing.load_state_dict(state)


class _Adding(Request):
    """A gather that is under way, and the sum that follows; in the caller's thread, as `incoming` is a tensor."""

    __slots__ = ("_dtype", "_outcome", "_packing", "_request", "_segment")

    def __init__(
        self, request: Request, packing: Packing, dtype: np.dtype[Any], segment: Segment, outcome: Outcome
    ) -> None:
        self._request: Request | None = request
        self._packing = packing
        self._dtype = dtype
        self._segment = segment
        self._outcome = outcome

    def done(self) -> bool:
        if self._request is not None and self._request.done():
            self._add(self._request.result)
        return self._request is None

    def wait(self, timeout_s: float | None = None) -> Outcome:
        if self._request is not None:
            self._add(self._request.wait(timeout_s))
        return self._outcome

    def _add(self, messages: Sequence[Array]) -> None:
        self._request = None
        segment = self._segment
        segment.incoming.zero_()
        for message in messages:
            self._packing.add(message.view(self._dtype), 1.0, segment, self._outcome.round)

    @property
    def result(self) -> Outcome:
        return self._outcome
