"""A channel that sends a segment to some ranks, receives some others', and adds them up with the topology's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hocket.collective.api import Channel, Outcome
from hocket.segment.segment import Segment
from hocket.topology import Topology
from hocket.transport.peer import Array, Lane, Peer, Request
from hocket.transport.reduction import weighted_sum

__all__ = ["GossipChannel"]


class GossipChannel(Channel):
    """Gossip with the neighbours that a topology names.

    What is received lies in buffers of its own, so that nobody gets a half-averaged value, and what is sent does
    not change until it is sent.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        topology: pure, so every rank knows with which weight a sender gives.
    """

    def __init__(self, peer: Peer, segments: Sequence[Segment], topology: Topology) -> None:
        self._rank, self._size = peer.rank, peer.size
        self._topology = topology
        self._lanes = [peer.lane(segment.name) for segment in segments]
        self._received: list[list[Array]] = [[] for _ in segments]

    def start(self, segment: Segment, round: int) -> Request:
        ask = self._topology.neighbours
        own = ask(self._rank, self._size, round, segment.index)
        weights = [own.self_weight]
        for source in own.receive_from:
            given = ask(source, self._size, round, segment.index)
            weights.append(given.send_weights[given.send_to.index(self._rank)])
        received = self._buffers(segment, len(own.receive_from))
        lane: Lane = self._lanes[segment.index]
        requests = [
            lane.irecv(a, source, round) for a, source in zip(received, own.receive_from, strict=True)
        ]
        requests += [lane.isend(segment.outgoing_array, to, round) for to in own.send_to]
        outcome = Outcome(round, included=True, num_active=len(weights))
        return _Mixing(
            requests, [segment.outgoing_array, *received], weights, segment.incoming_array, outcome
        )

    def _buffers(self, segment: Segment, count: int) -> list[Array]:
        buffers = self._received[segment.index]
        while len(buffers) < count:
            buffers.append(np.empty_like(segment.outgoing_array))
        return buffers[:count]

    def flush(self) -> None:
        """Nothing outlives its request here."""

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept between rounds."""


class _Mixing(Request):
    """Messages that are under way, and the sum that follows when all are through."""

    def __init__(
        self, requests: list[Request], values: list[Array], weights: list[float], out: Array, outcome: Outcome
    ) -> None:
        self._requests = requests
        self._values = values
        self._weights = weights
        self._out = out
        self._outcome = outcome
        self._mixed = False

    def done(self) -> bool:
        if not self._mixed:
            self._requests = [request for request in self._requests if not request.done()]
            if not self._requests:
                self._mix()
        return self._mixed

    def wait(self, timeout_s: float | None = None) -> Outcome:
        for request in self._requests:
            request.wait(timeout_s)
        self._requests = []
        if not self._mixed:
            self._mix()
        return self._outcome

    def _mix(self) -> None:
        weighted_sum(self._values, self._weights, self._out)
        self._mixed = True

    @property
    def result(self) -> Outcome:
        return self._outcome
