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

        def add(messages: Sequence[Array]) -> Outcome:
            segment.incoming.zero_()
            for message in messages:
                self.packing.add(message.view(payload.dtype), 1.0, segment, round)
            return Outcome(round, included=True, num_active=self._size)

        return request.then(add)

    def flush(self) -> None:
        """Nothing outlives its request here."""

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        return self.packing.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.packing.load_state_dict(state)
