"""The sum of all ranks' compressed contributions on every rank, by one gather of their messages.

Source: Fang et al., "RedSync", section 2.3: one allgather of packed messages, and a sparse addition of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from hocket.compressor.api import footprint_of, whole_bytes
from hocket.compressor.wrappers import Identity
from hocket.config.component import component_name

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.compressor.api import Compressor, SegmentShape
    from hocket.progress import ProgressEngine
    from hocket.segment.segment import Segment
    from hocket.topology import Topology
    from hocket.transport.network import NetworkModel
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request

__all__ = ["GatheringChannel", "Mean", "SparseAllreduce"]


class Mean(StrEnum):
    """What a sum is divided by."""

    RANKS = "ranks"
    CONTRIBUTORS = "contributors"


@dataclass(frozen=True)
class SparseAllreduce(Collective):
    """Every rank ends with the mean of what all ranks sent, the same bits everywhere.

    For messages that cannot be added in flight: sparse ones, or casts, which are so added in float32. Bytes and
    decompression grow with the number of ranks: dense messages are cheaper by allreduce from a few ranks on. Of
    parameters it is for distances from outer ones.

    Attributes:
        mean: over all `ranks`, or element by element over the `contributors` that have sent it: an element that one of
            p has sent moves p times as far. So do SparseLoCo's code and DeMo.
    """

    mean: Mean = Mean.RANKS

    @property
    def traits(self) -> CollectiveTraits:
        return CollectiveTraits(Ends.SAME, messages=Messages.GATHERED, sums=True)

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        packing = Packing(choices.compressor or Identity(), segments)
        return GatheringChannel(peer, segments, packing, of_contributors=self.mean is Mean.CONTRIBUTORS)

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return (p - 1) n bytes, as each message passes p - 1 links of a ring, and p n of memory."""
        return Cost(
            (size - 1) * message_bytes, network.allgatherv_seconds(message_bytes, size), size * message_bytes
        )

    def notes(
        self,
        compressor: Compressor | None,
        shapes: Sequence[SegmentShape],
        size: int,
        network: NetworkModel,
    ) -> list[str]:
        """Say from how many ranks on a gather sends more than an allreduce of whole values would."""
        packed = sum(footprint_of(compressor, shape).message_bytes for shape in shapes)
        if not packed:
            return []
        # (p - 1) n against 2 (p - 1) / p of the whole
        equal = 2 * sum(whole_bytes(shape) for shape in shapes) / packed
        more = " (it does here)" if size > equal else ""
        return [
            f"{component_name(self)} sends a message to each other rank: among more than about {equal:.0f} ranks "
            f"that is more than an allreduce of whole values sends{more}."
        ]


class GatheringChannel(Channel):
    """Puts the sum of all ranks' messages into everyone's `incoming`, the same bits on every rank.

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

    def start(self, segments: Sequence[Segment], round: int) -> Request:
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
        """Let sums of what counts 1 / p each become means over those that have sent an element."""
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
