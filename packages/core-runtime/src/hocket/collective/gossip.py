"""Gossip: every rank averages with the few that the topology names, in this round and for this segment.

Source: Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms" (2006); Lian et al., "Can Decentralized
Algorithms Outperform Centralized Algorithms?" (2017) for training by it; Kempe, Dobra, Gehrke, "Gossip-Based
Computation of Aggregate Information" (2003) for push-sum, and Assran et al., "Stochastic Gradient Push" (2019) for
training by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.collective.api import (
    Channel,
    Choices,
    Collective,
    CollectiveTraits,
    Cost,
    Ends,
    Messages,
    Outcome,
)
from hocket.collective.packing import Packing, packing_for
from hocket.compressor.api import footprint_of
from hocket.config.component import component_name
from hocket.errors import UserError
from hocket.topology.api import neighbours_fault
from hocket.transport.reduction import weighted_sum
from hocket.transport.request import Request

if TYPE_CHECKING:
    from hocket.arrays import Array, MixingRows
    from hocket.compressor.api import Compressor
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape
    from hocket.topology import Neighbours, Topology
    from hocket.transport.lane import Mixer
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request

# Topologies change from round to round; what a round costs is the mean over the first so many.
_ROUNDS_LOOKED_AT = 64

# In so many rounds, of which topologies mostly are periodic, a rank checks what concerns itself; of many ranks in one.
_ROUNDS_CHECKED = 8


@dataclass(frozen=True)
class Gossip(Collective):
    """Averages by a mixing matrix W: x_i becomes the sum over j of W[i, j] x_j.

    W belongs to the round and the segment.

    A doubly stochastic W keeps the mean over ranks, and repeated rounds lead every rank to it.
    Compressed parameters are mixed as x_i + sum over j of W[i, j] C(x_j) - C(x_i), which keeps the mean too.

    Attributes:
        push_sum: whether ranks also send a weight with each segment, mixed by the same W and 1 at first. Values
            divided by it approach the mean even if only W's columns sum to 1; the optimizer steps the undivided
            values. If W is doubly stochastic, weights stay 1, and this key costs nothing.
    """

    push_sum: bool = False

    @property
    def traits(self) -> CollectiveTraits:
        return CollectiveTraits(
            Ends.OWN,
            messages=Messages.GATHERED,
            needs_topology=True,
            pushes_weight=self.push_sum,
            threadable=True,
            on_devices=True,
        )

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        assert choices.topology is not None  # the rules of composition see to it
        packing = packing_for(choices.compressor, segments)
        return GossipChannel(peer, segments, choices.topology, packing, keeps_own=choices.keeps_own)

    def reads_shared(self, compressor: Compressor | None) -> bool:
        return compressor is None

    def in_place(self, choices: Choices, shared: bool) -> bool:
        # Values are combined when all are sent; only the sum of compressed messages begins from nothing.
        return choices.keeps_own or choices.compressor is None

    def message_bytes(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, network: NetworkModel
    ) -> float:
        """Return the bytes of the longest message, as receivers do not know a message's length."""
        return footprint_of(compressor, shape).longest_bytes

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return the cost of a message to each receiver, one after the other on a rank's link.

        The memory is for as many messages as the most that any rank hears from.
        """
        assert topology is not None
        sent, most_received = _degrees(topology, size)
        nbytes = sent * message_bytes
        return Cost(nbytes, network.message_seconds(nbytes), message_bytes * most_received)


class GossipChannel(Channel):
    """A channel that averages with the neighbours that a topology names.

    Received values lie in buffers of their own, so that no rank sends a half-averaged value; sent values do not
    change until they are sent.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        topology: pure, so every rank knows the weight of each sender.
        packing: gives the messages their form; None where segments travel as they are.
        keeps_own: whether a rank's own value stays whole, and only the part of it that was sent is replaced:
            x_i + sum over j of W[i, j] C(x_j) - C(x_i), which is W x for uncompressed messages. Else the result is
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
        lanes = {
            segment.index: peer.lane(segment.name, 0 if packing else segment.wire_bytes)
            for segment in segments
        }
        super().__init__(segments, lanes, packing)
        self._rank, self._size = peer.rank, peer.size
        self._topology = topology
        self._keeps_own = keeps_own
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
        self._common: _RoundPlan | None = None
        rounds = _ROUNDS_CHECKED if peer.size <= _ROUNDS_LOOKED_AT else 1
        self._plans_to_check = rounds * (len(segments) if topology.differs_by_segment else 1)
        mixed: dict[np.dtype[np.generic], list[Segment]] = {}
        for segment in segments:
            if segment.index in self._shared:
                mixed.setdefault(segment.outgoing_array.dtype, []).append(segment)
        alone = [[segment] for segment in segments if segment.index not in self._shared]
        self.groups = [*mixed.values(), *alone]

    def finds_nonfinite(self, segment: Segment) -> bool:
        return segment.index in self._shared

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        if all(segment.index in self._shared for segment in segments):
            mixed = self._mix(segments, round)
            if mixed is not None:
                return mixed
            # None is left of what else it takes of shared memory, or the transport wants messages. Nobody but the
            # caller finds NaN and Inf in messages: it learns so from the next round on.
            self._shared -= {segment.index for segment in segments}
        if len(segments) == 1:
            return self._send(segments[0], round)

        def combine(outcomes: list[Outcome]) -> Outcome:
            num_active = min(outcome.num_active for outcome in outcomes)
            return Outcome(round, included=True, num_active=num_active)

        return Request.all_of(self._send(segment, round) for segment in segments).then(combine)

    def _send(self, segment: Segment, round: int) -> Request[Outcome]:
        """Exchange messages with the neighbours, and combine them."""
        plan = self._plan(segment, round)
        neighbours, weights = plan.neighbours, plan.weights
        message = self._message(segment, round)
        received = self._buffers(segment.index, message, len(weights))
        lane = self._lanes[segment.index]
        request = lane.iexchange(
            [(message, to) for to in neighbours.send_to],
            [*zip(received, neighbours.receive_from, strict=True)],
            round,
        )

        def combine(_: object) -> Outcome:
            self._combine([message, *received], [neighbours.self_weight, *weights], segment, round)
            return Outcome(round, included=True, num_active=1 + len(weights))

        return request.then(combine)

    def _mix(self, segments: Sequence[Segment], round: int) -> Request[Outcome] | None:
        """Share the work among the ranks of the host, if the transport can."""
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

    def _plan(self, segment: Segment, round: int) -> _RoundPlan:
        if self._topology.differs_by_segment:
            return self._new_plan(segment, round, segment.index)
        if self._common is None or self._common.round != round:
            self._common = self._new_plan(segment, round, 0)
        return self._common

    def _new_plan(self, segment: Segment, round: int, asked: int) -> _RoundPlan:
        plan = _RoundPlan(self._topology, self._rank, self._size, round, asked)
        if self._plans_to_check:
            self._plans_to_check -= 1
            plan.check(segment.name)
        return plan

    def _message(self, segment: Segment, round: int) -> Array:
        if self.packing is None:
            whole: Array = segment.outgoing_array
            return whole
        payload = self.packing.pack(segment, round)
        if self.packing.traits.equal_sizes:
            return payload
        # Receivers do not know the length: what is sent is as long as any, and says itself where it ends.
        sent = self._sent.setdefault(segment.index, np.zeros(self.packing.capacity_bytes(segment), np.uint8))
        sent[: payload.nbytes] = payload.view(np.uint8)
        self.packing.packed_bytes[segment.index] = sent.nbytes
        return sent

    def _buffers(self, index: int, like: Array, count: int) -> list[Array]:
        buffers = self._received[index]
        while len(buffers) < count:
            buffers.append(
                np.empty_like(like) if isinstance(like, np.ndarray) else like.new_empty(like.shape)
            )
        return buffers[:count]

    def _combine(
        self, messages: Sequence[Array], weights: Sequence[float], segment: Segment, round: int
    ) -> None:
        """Add messages up, this rank's own first."""
        if self.packing is None:
            combine = (
                weighted_sum if isinstance(segment.incoming_array, np.ndarray) else _weighted_sum_of_tensors
            )
            combine(messages, weights, segment.incoming_array)
            return
        own_weight, *others = weights
        if self._keeps_own:
            segment.incoming.copy_(segment.outgoing)
            own_weight -= 1.0
        else:
            segment.incoming.zero_()
        for message, weight in zip(messages, (own_weight, *others), strict=True):
            self.packing.add(message, weight, segment, round)


def _weighted_sum_of_tensors(tensors: Sequence[Any], weights: Sequence[float], out: Any) -> None:
    """Compute `weighted_sum` of tensors on a device."""
    out.copy_(tensors[0]).mul_(weights[0])
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        out.add_(tensor.mul_(weight))


class _RoundPlan:
    """A rank's neighbours and weights in a round, of one segment or of all; computed on demand."""

    def __init__(self, topology: Topology, rank: int, size: int, round: int, segment: int) -> None:
        self.round = round
        self._topology = topology
        self._asked = rank, size, round, segment

    @cached_property
    def neighbours(self) -> Neighbours:
        """Return the ranks that this one sends to and receives from."""
        return self._topology.neighbours(*self._asked)

    @cached_property
    def weights(self) -> list[float]:
        """Return the weight of each rank that this one receives from."""
        rank, *asked = self._asked
        given = [self._topology.neighbours(source, *asked) for source in self.neighbours.receive_from]
        return [source.send_weights[source.send_to.index(rank)] for source in given]

    def check(self, name: str) -> None:
        """Refuse neighbours or weights that contradict each other.

        Args:
            name: the segment's, for the message.

        Raises:
            UserError: a topology breaks its contract; names segment, topology, round and ranks.
        """
        rank, size, *asked = self._asked
        fault = neighbours_fault(
            self._topology, rank, size, lambda other: self._topology.neighbours(other, size, *asked)
        )
        if fault is None and self._topology.neighbours(*self._asked) != self.neighbours:
            fault = f"rank {rank} of {size} gets other neighbours from a second call: a topology must be pure"
        if fault is not None:
            raise UserError(
                f"{name}: topology {component_name(self._topology)} in round {self.round}: {fault}. Run its "
                "conformance suite, hocket.testing.topology.TopologyConformance"
            )

    @cached_property
    def mixing_rows(self) -> MixingRows:
        """Return the rows of the mixing matrix, one for each rank."""
        return self._topology.mixing_rows(*self._asked[1:])


@lru_cache(maxsize=16)
def _degrees(topology: Topology, size: int) -> tuple[float, int]:
    """Return the mean number of ranks that one sends to, and the largest number that one hears from."""
    rounds = range(_ROUNDS_LOOKED_AT if size <= _ROUNDS_LOOKED_AT else 1)
    asked = [topology.neighbours(rank, size, round, 0) for round in rounds for rank in range(size)]
    sent = sum(len(neighbours.send_to) for neighbours in asked)
    return sent / len(asked), max(len(neighbours.receive_from) for neighbours in asked)
