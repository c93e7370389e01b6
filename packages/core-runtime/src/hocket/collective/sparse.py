"""The sum of all ranks' compressed contributions on every rank: by one gather of their messages, or scalable.

Source: Fang et al., "RedSync", section 2.3: one allgather of packed messages, and a sparse addition of each. The
scalable way is in `hocket.collective.scalable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

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
from hocket.collective.packing import Packing
from hocket.compressor.api import footprint_of
from hocket.compressor.wrapper import Identity
from hocket.config.component import component_name

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.compressor.api import Compressor
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request


class Mean(StrEnum):
    """A divisor of sums."""

    RANKS = "ranks"
    CONTRIBUTORS = "contributors"


class SparseAlgorithm(StrEnum):
    """An algorithm that brings sparse messages to all ranks."""

    AUTO = "auto"
    GATHER = "gather"
    SCALABLE = "scalable"


@dataclass(frozen=True)
class SparseAllreduce(Collective):
    """An allreduce of sparse messages: every rank ends with the same mean of all sent values, bit for bit.

    For messages that cannot be added in flight: sparse ones, or casts, which are so added in float32. Of parameters it
    is for distances from outer ones.

    Attributes:
        mean: the divisor of an element's sum: the number of `ranks`, or of the `contributors`, the ranks that sent this
            element. With `contributors`, an element that one of p ranks sent moves p times as far, as in SparseLoCo's
            code and DeMo.
        algorithm: `gather` sends every message to all ranks: bytes and decompression grow with the number of ranks, so
            from a few ranks on a dense allreduce is cheaper. With `scalable` each rank adds up a region of the segment
            and keeps about as many elements as one message has. A rank then sends 2.5 times the bytes of a message,
            with any number of ranks. Elements that were sent but not kept stay in the sender's residual. `auto` chooses
            the one that the cost model predicts to be faster for each segment, from constants measured when a session
            opens; another run, or a resumed one, may choose the other. If a compressor does not declare what it
            selects, `auto` chooses `gather`. `-v` shows the choice.
    """

    mean: Mean = Mean.RANKS
    algorithm: SparseAlgorithm = SparseAlgorithm.GATHER

    @property
    def traits(self) -> CollectiveTraits:
        return CollectiveTraits(
            Ends.SAME,
            messages=Messages.GATHERED,
            sums=True,
        )

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        packing = Packing(choices.compressor or Identity(), segments)
        if self.algorithm is not SparseAlgorithm.AUTO:
            return self._open(peer, segments, progress, packing)
        from hocket.collective.choosing import ChosenChannel

        collectives = self._chosen(peer, segments, packing.compressor)
        algorithms = [collective.algorithm for collective in collectives]

        def open_part(collective: SparseAllreduce, own: Sequence[Segment]) -> Channel:
            return collective._open(peer, own, progress, packing)

        return ChosenChannel(peer, segments, collectives, algorithms, open_part, packing, choices.name)

    def _open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, packing: Packing
    ) -> Channel:
        of_contributors = self.mean is Mean.CONTRIBUTORS
        if self.algorithm is SparseAlgorithm.GATHER:
            return GatheringChannel(peer, segments, packing, of_contributors=of_contributors)
        from hocket.collective.scalable import ScalableChannel

        contents = {
            segment.index: (segment.spans, packing.compressor.num_selected(segment)) for segment in segments
        }
        return ScalableChannel(peer, segments, progress, packing, contents, of_contributors=of_contributors)

    def _chosen(
        self, peer: Peer, segments: Sequence[Segment], compressor: Compressor
    ) -> list[SparseAllreduce]:
        """Return for each segment the collective with its algorithm; collective."""
        if peer.size == 1 or not compressor.traits.selects:
            return [replace(self, algorithm=SparseAlgorithm.GATHER)] * len(segments)
        from hocket.collective.choosing import measured_network

        network = measured_network(peer)
        return [self._fixed(compressor, segment, peer.size, network) for segment in segments]

    def _fixed(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, network: NetworkModel
    ) -> SparseAllreduce:
        """Return this collective with the faster algorithm for a segment; the gather if equal."""
        if self.algorithm is not SparseAlgorithm.AUTO:
            return self
        if compressor is None or not compressor.traits.selects:
            return replace(self, algorithm=SparseAlgorithm.GATHER)
        ways = [replace(self, algorithm=each) for each in (SparseAlgorithm.GATHER, SparseAlgorithm.SCALABLE)]
        return min(ways, key=lambda way: way._cost(compressor, shape, size, network).seconds)

    def _cost(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, network: NetworkModel
    ) -> Cost:
        return self.cost(self.message_bytes(compressor, shape, size, network), size, None, network)

    def in_place(self, choices: Choices, shared: bool) -> bool:
        return True  # messages have buffers of their own

    def check_compressor(self, compressor: Compressor | None) -> None:
        if self.algorithm is not SparseAlgorithm.SCALABLE or (
            compressor is not None and compressor.traits.selects
        ):
            return
        name = "none" if compressor is None else component_name(compressor)
        raise ValueError(
            f"algorithm {self.algorithm} adds up the elements that messages carry, but compressor {name} does not say "
            "which elements it selects: use topk, redsync.hybrid, or sparse_allreduce with `algorithm: gather`"
        )

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return a segment's cost; with `auto` that of a gather by the bytes from `message_bytes`."""
        if self.algorithm is SparseAlgorithm.SCALABLE:
            from hocket.collective.scalable import scalable_cost

            return scalable_cost(message_bytes, size, network)
        return gather_cost(message_bytes, size, network)

    def message_bytes(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, network: NetworkModel
    ) -> float:
        """Return a message's bytes; if scalable those of all shares, with `auto` of an equally fast gather."""
        if self.algorithm is SparseAlgorithm.GATHER:
            return super().message_bytes(compressor, shape, size, network)
        if self.algorithm is SparseAlgorithm.AUTO:
            fixed = self._fixed(compressor, shape, size, network)
            return fixed._cost(compressor, shape, size, network).bytes / max(size - 1, 1)
        from hocket.collective.scalable import share_bytes

        assert compressor is not None
        return size * share_bytes(shape, compressor.num_selected(shape), size)

    def notes(
        self,
        compressor: Compressor | None,
        shapes: Sequence[SegmentShape],
        size: int,
        network: NetworkModel,
    ) -> list[str]:
        """Return the number of ranks from which an allreduce sends less than a gather; what `auto` takes."""
        if self.algorithm is SparseAlgorithm.AUTO and size > 1:
            from hocket.collective.choosing import describe_choice

            taken = [self._fixed(compressor, shape, size, network).algorithm for shape in shapes]
            sizes = [footprint_of(compressor, shape).message_bytes for shape in shapes]
            return [
                f"{component_name(self)} with `algorithm: auto` takes {describe_choice(taken, sizes)} among "
                f"{size} ranks on the network above. When a session opens, it measures the cost of messages."
            ]
        if self.algorithm is not SparseAlgorithm.GATHER:
            return []
        packed = sum(footprint_of(compressor, shape).message_bytes for shape in shapes)
        if not packed:
            return []
        # (p - 1) n against 2 (p - 1) / p of the whole
        equal = 2 * sum(shape.wire_bytes for shape in shapes) / packed
        more = " (as here)" if size > equal else ""
        return [
            f"{component_name(self)} sends a message to every other rank. Among more than about {equal:.0f} "
            f"ranks this is more than an allreduce of uncompressed values{more}."
        ]


def gather_cost(message_bytes: float, size: int, network: NetworkModel) -> Cost:
    """Return (p - 1) n bytes, as each message passes p - 1 links, and p n of memory."""
    return Cost(
        (size - 1) * message_bytes, network.allgatherv_seconds(message_bytes, size), size * message_bytes
    )


class GatheringChannel(Channel):
    """A channel that puts the sum of all ranks' messages into every `incoming`, with equal bits.

    Messages are added in the order of their ranks. They may differ in length, and be as short as nothing.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        packing: gives the messages their form.
        of_contributors: whether an element's mean is over those that have sent it, of contributions that count 1 / p.
    """

    packing: Packing

    def __init__(
        self, peer: Peer, segments: Sequence[Segment], packing: Packing, *, of_contributors: bool = False
    ) -> None:
        super().__init__(segments, {segment.index: peer.lane(segment.name) for segment in segments}, packing)
        self._size = peer.size
        # By the segment's index: how many have sent an element, and which elements one has left out.
        self._shares: dict[int, tuple[Tensor, Tensor]] | None = {} if of_contributors else None
        self._received = {
            segment.index: np.empty((peer.size, packing.capacity_bytes(segment)), np.uint8)
            for segment in segments
        }

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        payload = self.packing.pack(segment, round)
        raw = payload.reshape(-1).view(np.uint8)
        request = self._lanes[segment.index].iallgather(raw, self._received[segment.index])

        def add(messages: Sequence[Array]) -> Outcome:
            segment.incoming.zero_()
            for message in messages:
                self.packing.add(message.view(payload.dtype), 1.0, segment, round)
            if self._shares is not None:
                self._share_out(messages, payload.dtype, segment, round)
            self.packing.end(segment)
            return Outcome(round, included=True, num_active=self._size)

        return request.then(add)

    def _share_out(
        self, messages: Sequence[Array], dtype: np.dtype[np.generic], segment: Segment, round: int
    ) -> None:
        """Turn sums of contributions that count 1 / p each into means over the ranks that sent an element."""
        import torch

        assert self._shares is not None
        sums = segment.incoming[: segment.numel]
        shares, left_out = self._shares.setdefault(
            segment.index, (torch.empty_like(sums), torch.empty_like(sums))
        )
        shares.fill_(len(messages))
        for message in messages:
            self.packing.clear(message.view(dtype), segment, round, left_out.fill_(1))
            shares.sub_(left_out)
        sums.mul_(len(messages)).div_(shares.clamp_(min=1))
