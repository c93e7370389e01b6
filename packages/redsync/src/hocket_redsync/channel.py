"""The channel of `redsync.allreduce`: a gather of what is sparse beside an allreduce of what is dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hocket.api import (
    Channel,
    Compressor,
    GatheringChannel,
    Lane,
    Outcome,
    Packing,
    Peer,
    Request,
    Segment,
    WrapperState,
    all_of,
    allocate,
)
from hocket_redsync.state import ResidualState

__all__ = ["RedSyncChannel"]


class RedSyncChannel(Channel):
    """Puts the sum of all ranks' gradients into everyone's `incoming`, the same bits on every rank.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        compressor: of RedSync, or wrappers around one.
        dense: for each segment the positions of the parameters that are; the same on every rank.
    """

    packing: Packing

    def __init__(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        compressor: Compressor,
        dense: Sequence[frozenset[int]],
    ) -> None:
        super().__init__(segments, {}, Packing(compressor, segments))
        self._peer = peer
        self._segments = segments
        self._open(dense)

    def _open(self, dense: Sequence[frozenset[int]]) -> None:
        pairs = list(zip(self._segments, dense, strict=True))
        gathered = [segment for segment, positions in pairs if len(positions) < len(segment.spans)]
        self._gathering = GatheringChannel(self._peer, gathered, self.packing)
        self._gathered = {segment.index for segment in gathered}
        self._dense: dict[int, _DensePart] = {}
        for segment, positions in pairs:
            self._state(segment).elsewhere = positions
            if positions:
                self._dense[segment.index] = _DensePart(self._peer, segment, positions)

    def _state(self, segment: Segment) -> ResidualState:
        state = self.packing.states[segment.index]
        while isinstance(state, WrapperState):
            state = state.inner
        assert isinstance(state, ResidualState)
        return state

    def start(self, segments: Sequence[Segment], round: int) -> Request:
        [segment] = segments
        dense = self._dense.get(segment.index)
        if dense is None:
            return self._gathering.start(segments, round)
        requests = []
        if segment.index in self._gathered:
            requests.append(self._gathering.start(segments, round))
        else:
            self.packing.pack(segment, round)  # momentum, which leaves in `outgoing` what is summed
            self.packing.packed_bytes[segment.index] = 0
        requests.append(dense.start())
        self.packing.packed_bytes[segment.index] += dense.as_gathered_bytes

        def finish(_: list[Outcome | None]) -> Outcome:
            dense.finish()
            return Outcome(round, included=True, num_active=self._peer.size)

        return all_of(requests).then(finish)

    def close(self) -> None:
        self._gathering.close()
        for dense in self._dense.values():
            dense.lane.close()

    def state_dict(self) -> dict[str, Any]:
        dense = {str(segment.index): sorted(self._state(segment).elsewhere) for segment in self._segments}
        return {"messages": self.packing.state_dict(), "dense": dense}

    def resume(self, rounds: Mapping[int, int], state: dict[str, Any] | None) -> None:
        """Continue, with the saved run's choices: what a parameter's residual holds would not be sent by another."""
        if state is None:
            return
        self.packing.load_state_dict(state["messages"])
        dense = [frozenset(state["dense"][str(segment.index)]) for segment in self._segments]
        if dense != [self._state(segment).elsewhere for segment in self._segments]:
            self.close()
            self._open(dense)


class _DensePart:
    """The dense parameters of a segment on their way through an allreduce.

    All of a segment's travel between its own buffers, with its trailer; some are packed, and the trailer travels
    with the gather.

    Attributes:
        lane: where they do.
        as_gathered_bytes: the bytes of a message whose gather would have a rank send as much, by which it is counted.
    """

    def __init__(self, peer: Peer, segment: Segment, positions: frozenset[int]) -> None:
        self._segment = segment
        self._whole = len(positions) == len(segment.spans)
        nbytes = segment.wire_bytes
        if not self._whole:
            spans = [segment.spans[position] for position in sorted(positions)]
            numel, dtype = sum(span.numel for span in spans), segment.outgoing.dtype
            self._send, self._receive = (allocate(peer, numel, dtype, torch.device("cpu")) for _ in range(2))
            self._places = [slice(span.start, span.stop) for span in spans]
            nbytes = numel * dtype.itemsize
        self.lane: Lane = peer.lane(f"{segment.name} dense", nbytes)
        self.as_gathered_bytes = 2 / peer.size * nbytes

    def start(self) -> Request:
        """Send what `outgoing` holds."""
        segment = self._segment
        if self._whole:
            segment.stage_out()
            return self.lane.iallreduce(segment.outgoing_array, segment.incoming_array)
        for part, place in zip(self._parts(self._send), self._places, strict=True):
            part.copy_(segment.outgoing[place])
        return self.lane.iallreduce(self._send.numpy(), self._receive.numpy())

    def finish(self) -> None:
        """Put the sum into `incoming`, into which the gathered part has been added."""
        if self._whole:
            self._segment.stage_in()
            return
        for part, place in zip(self._parts(self._receive), self._places, strict=True):
            self._segment.incoming[place] = part

    def _parts(self, packed: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(packed, [place.stop - place.start for place in self._places])
