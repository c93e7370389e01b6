"""The channel of `redsync.allreduce`: a sparse exchange, gathered or scalable, beside a dense allreduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hocket.api import (
    Channel,
    Compressor,
    GatheringChannel,
    Lane,
    Outcome,
    Packing,
    Peer,
    ProgressEngine,
    Request,
    ScalableChannel,
    Segment,
    SparseAlgorithm,
    WrapperState,
    plain,
)
from hocket_redsync.choosing import Way, num_selected
from hocket_redsync.residual import ResidualCompressor
from hocket_redsync.state import ResidualState


class RedSyncChannel(Channel):
    """The channel that puts the sum of all ranks' gradients into `incoming`, the same bits on every rank.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        progress: carries out scalable exchanges.
        compressor: one of RedSync's, or wrappers around one.
        own: RedSync's.
        ways: the way that each segment's parameters travel; the same on every rank.
    """

    packing: Packing

    def __init__(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        progress: ProgressEngine,
        compressor: Compressor,
        own: ResidualCompressor,
        ways: Sequence[Way],
    ) -> None:
        super().__init__(segments, {}, Packing(compressor, segments))
        self._peer = peer
        self._segments = segments
        self._progress = progress
        self._own = own
        self._open(ways)

    def _open(self, ways: Sequence[Way]) -> None:
        self._ways = list(ways)
        pairs = list(zip(self._segments, ways, strict=True))
        sparse = [(segment, way) for segment, way in pairs if len(way.dense) < len(segment.spans)]
        gathered = [segment for segment, way in sparse if way.algorithm is not SparseAlgorithm.SCALABLE]
        scalable = [(segment, way) for segment, way in sparse if way.algorithm is SparseAlgorithm.SCALABLE]
        contents = {
            segment.index: (
                [span for i, span in enumerate(segment.spans) if i not in way.dense],
                num_selected(self._own, segment, way.dense),
            )
            for segment, way in scalable
        }
        self._to_each = {
            segment.index: ScalableChannel.bytes_to_each(segment, contents[segment.index][1], self._peer.size)
            for segment, _ in scalable
        }
        self._gathering = GatheringChannel(self._peer, gathered, self.packing)
        self._scaling = ScalableChannel(
            self._peer, [segment for segment, _ in scalable], self._progress, self.packing, contents
        )
        self._sparse: dict[int, Channel] = {
            segment.index: part for part in (self._gathering, self._scaling) for [segment] in part.groups
        }
        self._dense: dict[int, _DensePart] = {}
        for segment, way in pairs:
            state = self._state(segment)
            state.elsewhere, state.shared_terms = way.dense, None
            if way.dense:
                self._dense[segment.index] = _DensePart(self._peer, segment, way.dense)

    def _state(self, segment: Segment) -> ResidualState:
        state = self.packing.states[segment.index]
        while isinstance(state, WrapperState):
            state = state.inner
        assert isinstance(state, ResidualState)
        return state

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        [segment] = segments
        dense, sent = self._dense.get(segment.index), self.packing.packed_bytes
        sparse: Request[Outcome] | None = None
        if segment.index in self._sparse:
            sparse = self._sparse[segment.index].start(segments, round)
            if segment.index in self._to_each:
                sent[segment.index] = self._to_each[segment.index]
        else:
            self.packing.pack(segment, round)  # momentum, which leaves in `outgoing` what is summed
            sent[segment.index] = 0
        if dense is None:
            assert sparse is not None
            return sparse
        requests: list[Request] = [dense.start()] if sparse is None else [sparse, dense.start()]
        sent[segment.index] += dense.as_gathered_bytes

        def finish(_: object) -> Outcome:
            dense.finish()
            return Outcome(round, included=True, num_active=self._peer.size)

        return Request.all_of(requests).then(finish)

    def close(self) -> None:
        self._gathering.close()
        self._scaling.close()
        for dense in self._dense.values():
            dense.lane.close()

    def state_dict(self) -> plain.Tree:
        return {
            "messages": self.packing.state_dict(),
            "ways": {
                str(segment.index): {"dense": sorted(way.dense), "algorithm": str(way.algorithm)}
                for segment, way in zip(self._segments, self._ways, strict=True)
            },
            "cuts": self._scaling.cuts_state(),
        }

    def resume(self, rounds: Mapping[int, int], state: plain.Tree | None) -> None:
        """Continue with the saved run's choices: another choice might never send a parameter's residual."""
        if state is None:
            return
        self.packing.load_state_dict(state["messages"])
        saved = [state["ways"][str(segment.index)] for segment in self._segments]
        ways = [Way(frozenset(way["dense"]), SparseAlgorithm(way["algorithm"])) for way in saved]
        if ways != self._ways:
            self.close()
            self._open(ways)
        self._scaling.load_cuts(state["cuts"])


class _DensePart:
    """The dense parameters of a segment on their way through an allreduce.

    All of a segment's travel between its own buffers, with its trailer; some are packed, and the trailer travels
    with the gather.

    Attributes:
        lane: the lane that they travel on.
        as_gathered_bytes: the bytes of a message whose gather would have a rank send as much, by which it is counted.
    """

    def __init__(self, peer: Peer, segment: Segment, positions: frozenset[int]) -> None:
        self._segment = segment
        self._whole = len(positions) == len(segment.spans)
        nbytes = segment.wire_bytes
        if not self._whole:
            spans = [segment.spans[position] for position in sorted(positions)]
            numel, dtype = sum(span.numel for span in spans), segment.outgoing.dtype
            nbytes = numel * dtype.itemsize
            self._send, self._receive = (
                torch.from_numpy(peer.memory.allocate(nbytes)).view(dtype) for _ in range(2)
            )
            self._sent, self._came = (
                [flat[s.start : s.stop] for s in spans] for flat in (segment.outgoing, segment.incoming)
            )
            self._parts = torch.split(self._receive, [span.numel for span in spans])
        self.lane: Lane = peer.lane(f"{segment.name} dense", nbytes)
        self.as_gathered_bytes = 2 / peer.size * nbytes

    def start(self) -> Request:
        """Send `outgoing`."""
        segment = self._segment
        if self._whole:
            segment.stage_out()
            return self.lane.iallreduce(segment.outgoing_array, segment.incoming_array)
        self._send.copy_(torch.cat(self._sent))
        return self.lane.iallreduce(self._send.numpy(), self._receive.numpy())

    def finish(self) -> None:
        """Put the sum into `incoming`, into which the gathered part has been added."""
        if self._whole:
            self._segment.stage_in()
            return
        torch._foreach_copy_(self._came, self._parts)
