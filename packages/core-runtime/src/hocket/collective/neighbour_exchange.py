"""A channel that sends a segment to some ranks, receives some others', and adds them up with the topology's weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hocket.arrays import Array, MixingRows
from hocket.collective.api import Channel, Outcome
from hocket.collective.packing import Packing
from hocket.segment.segment import Segment
from hocket.topology import Neighbours, Topology
from hocket.transport.lane import Lane, Mixer
from hocket.transport.peer import Peer
from hocket.transport.reduction import weighted_sum
from hocket.transport.request import Request, all_of

__all__ = ["GossipChannel"]


class GossipChannel(Channel):
    """Gossip with the neighbours that a topology names.

    What is received lies in buffers of its own, so that nobody gets a half-averaged value, and what is sent does
    not change until it is sent.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        topology: pure, so every rank knows with which weight a sender gives.
        packing: gives the messages their form; None where segments travel as they are.
        keeps_own: whether a rank's own value stays whole, and only what of it was sent is exchanged for what came:
            x_i + sum over j of W[i, j] C(x_j) - C(x_i), which for messages that are whole is W x. Else the result is
            the weighted sum of the messages.
    """

    def __init__(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        topology: Topology,
        packing: Packing | None = None,
        *,
        keeps_own: bool = True,
    ) -> None:
        self.packing = packing
        self._rank, self._size = peer.rank, peer.size
        self._topology = topology
        self._keeps_own = keeps_own
        self._lanes: dict[int, Lane] = {
            segment.index: peer.lane(segment.name, 0 if packing else segment.wire_bytes)
            for segment in segments
        }
        self._shared = {
            segment.index
            for segment in segments
            if not packing and peer.memory.works_in_place(segment.outgoing_array)
        }
        # By the indices of the segments that start together.
        self._mixers: dict[tuple[int, ...], Mixer | None] = {}
        self._received: dict[int, list[Array]] = {segment.index: [] for segment in segments}
        self._sent: dict[int, Array] = {}
        #: The last round's, where it is the same for all segments.
        self._common: _Plan | None = None

    def finds_nonfinite(self, segment: Segment) -> bool:
        return segment.index in self._shared

    def start(self, segment: Segment, round: int) -> Request:
        if segment.index in self._shared:
            mixed = self._mix([segment], round)
            if mixed is not None:
                return mixed
            # Nobody but the caller finds NaN and Inf in messages: it is told so from the next round on.
            self._shared.discard(segment.index)
        plan = self._plan(segment, round)
        neighbours, weights = plan.neighbours, plan.weights
        message = self._message(segment, round)
        received = self._buffers(segment.index, message, len(weights))
        lane = self._lanes[segment.index]
        requests = [
            lane.irecv(buffer, source, round)
            for buffer, source in zip(received, neighbours.receive_from, strict=True)
        ]
        requests += [lane.isend(message, to, round) for to in neighbours.send_to]

        def combine(_: list[None]) -> Outcome:
            if self.packing is None:
                own = [segment.outgoing_array, *received]
                weighted_sum(own, [neighbours.self_weight, *weights], segment.incoming_array)
            else:
                terms = zip([message, *received], [neighbours.self_weight, *weights], strict=True)
                self._combine_messages(self.packing, segment, round, list(terms))
            return Outcome(round, included=True, num_active=1 + len(weights))

        return all_of(requests).then(combine)

    def together(self, segments: Sequence[Segment]) -> Sequence[Sequence[Segment]]:
        shared: dict[Any, list[Segment]] = {}
        alone = []
        for segment in segments:
            if segment.index in self._shared:
                shared.setdefault(segment.outgoing_array.dtype, []).append(segment)
            else:
                alone.append([segment])
        return [*shared.values(), *alone]

    def start_together(self, segments: Sequence[Segment], round: int) -> Request:
        mixed = self._mix(segments, round)
        if mixed is not None:
            return mixed
        # The buffers lie in shared memory, and none was left for what else it takes; or the transport wants messages.

        def combine(outcomes: list[Outcome]) -> Outcome:
            num_active = min(outcome.num_active for outcome in outcomes)
            nonfinite = {rank for outcome in outcomes for rank in outcome.nonfinite}
            return Outcome(round, included=True, num_active=num_active, nonfinite=tuple(sorted(nonfinite)))

        return all_of(self.start(segment, round) for segment in segments).then(combine)

    def _mix(self, segments: Sequence[Segment], round: int) -> Request | None:
        """Let the ranks of the host share the work, if the transport can."""
        indices = tuple(segment.index for segment in segments)
        if indices not in self._mixers:
            places = [(segment.outgoing_array, segment.incoming_array) for segment in segments]
            self._mixers[indices] = self._lanes[indices[0]].mixer(places)
        mixer = self._mixers[indices]
        if mixer is None:
            return None
        terms = [self._plan(segment, round).mixing_rows for segment in segments]
        num_active = min(int(own.starts[self._rank + 1] - own.starts[self._rank]) for own in terms)
        return mixer.start(terms).then(
            lambda nonfinite: Outcome(round, included=True, num_active=num_active, nonfinite=nonfinite)
        )

    def _plan(self, segment: Segment, round: int) -> _Plan:
        if self._topology.differs_by_segment:
            return _Plan(self._topology, self._rank, self._size, round, segment.index)
        if self._common is None or self._common.round != round:
            self._common = _Plan(self._topology, self._rank, self._size, round, 0)
        return self._common

    def _message(self, segment: Segment, round: int) -> Array:
        if self.packing is None:
            return segment.outgoing_array
        payload = self.packing.pack(segment, round)
        if self.packing.compressor.equal_sizes:
            return payload
        # Receivers do not know the length: what is sent is as long as any, and says itself where it ends.
        sent = self._sent.setdefault(segment.index, np.zeros(self.packing.capacity_bytes(segment), np.uint8))
        sent[: payload.nbytes] = payload.view(np.uint8)
        self.packing.packed_bytes[segment.index] = sent.nbytes
        return sent

    def _buffers(self, index: int, like: Array, count: int) -> list[Array]:
        buffers = self._received[index]
        while len(buffers) < count:
            buffers.append(np.empty_like(like))
        return buffers[:count]

    def _combine_messages(
        self, packing: Packing, segment: Segment, round: int, terms: list[tuple[Array, float]]
    ) -> None:
        if self._keeps_own:
            segment.incoming.copy_(segment.outgoing)
            own, own_weight = terms[0]
            terms[0] = (own, own_weight - 1.0)
        else:
            segment.incoming.zero_()
        for message, weight in terms:
            packing.add(message, weight, segment, round)

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


class _Plan:
    """What a rank does in a round, of one segment or of all; worked out as far as it is asked for."""

    def __init__(self, topology: Topology, rank: int, size: int, round: int, segment: int) -> None:
        self.round = round
        self._topology = topology
        self._asked = rank, size, round, segment

    @cached_property
    def neighbours(self) -> Neighbours:
        """Whom the rank sends to and receives from."""
        return self._topology.neighbours(*self._asked)

    @cached_property
    def weights(self) -> list[float]:
        """With which weight each of those counts from whom the rank receives."""
        rank, *asked = self._asked
        given = [self._topology.neighbours(source, *asked) for source in self.neighbours.receive_from]
        return [source.send_weights[source.send_to.index(rank)] for source in given]

    @cached_property
    def mixing_rows(self) -> MixingRows:
        """What all ranks add up."""
        return self._topology.mixing_rows(*self._asked[1:])
