"""The mean of all ranks' gradients, with each parameter sparse or dense, whichever is cheaper.

Source: Fang et al., "RedSync", section 2.3: one allgather of packed messages, the cost model, and dense allreduce where
compression does not pay. Scalable: Ok-Topk, see `hocket.collective.scalable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.api import SparseAlgorithm, SparseAllreduce
from hocket_redsync.cost import CostModel

if TYPE_CHECKING:
    from hocket.api import (
        Channel,
        Choices,
        CollectiveTraits,
        Compressor,
        Cost,
        NetworkModel,
        Peer,
        ProgressEngine,
        Segment,
        SegmentShape,
        Topology,
    )
    from hocket_redsync.choosing import Choice
    from hocket_redsync.residual import ResidualCompressor


@dataclass(frozen=True)
class RedSyncAllreduce(SparseAllreduce):
    """An allreduce that sends a segment's sparse parameters in one message and sums its dense ones.

    Only with compressors of RedSync. Where nothing is sparse this is the transport's own allreduce, between the
    segment's own buffers. Bytes are counted as those of a message whose gather would send as much.

    Attributes:
        auto: true: the cost model decides which parameters are dense; false: the compressor's policy does.
        algorithm: the algorithm for sparse parameters, as in `sparse_allreduce`; `auto` uses the cost model in `costs`.
        costs: the cost model of the machine. None: the ranks measure it when a session opens, in some tenths of a
            second, and agree on it; a resumed run keeps its choices, and another run may make different ones.
    """

    auto: bool = True
    costs: CostModel | None = None

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        """Open a channel.

        Raises:
            ValueError: the compressor is none of RedSync's.
        """
        from hocket_redsync.channel import RedSyncChannel

        own, compressor = _own(choices.compressor), choices.compressor
        assert compressor is not None
        costs = self.costs
        if costs is None and self._asks_costs:
            from hocket_redsync.calibration import calibrate

            costs = calibrate(peer, progress, segments[0].outgoing.device)
        costs = costs or _FREE
        ways = [self._choice(compressor, segment, peer.size, costs).way for segment in segments]
        channel = RedSyncChannel(peer, segments, progress, compressor, own, ways)
        if all(len(way.dense) == len(segment.spans) for way, segment in zip(ways, segments, strict=True)):
            channel.notice = _why_dense(own, segments, peer.size)
        return channel

    @property
    def _asks_costs(self) -> bool:
        return self.auto or self.algorithm is SparseAlgorithm.AUTO

    def _choice(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, costs: CostModel
    ) -> Choice:
        from hocket_redsync.choosing import choose

        return choose(_own(compressor), shape, size, costs, auto=self.auto, algorithm=self.algorithm)

    def check_compressor(self, compressor: Compressor | None) -> None:
        """Refuse compressors that are none of RedSync's, nor wrappers around one, and means where sums are needed."""
        _own(compressor)
        super().check_compressor(compressor)

    @property
    def traits(self) -> CollectiveTraits:
        return replace(super().traits, slots=frozenset({"gradients"}))

    def in_place(self, choices: Choices, shared: bool) -> bool:
        return shared  # as an allreduce, by which dense ones travel

    def cost(self, message_bytes: float, size: int, topology: Topology | None, network: NetworkModel) -> Cost:
        """Return the cost of a gather, whatever the algorithm: `message_bytes` are those of an equal one.

        Only the memory is the algorithm's own, for a message of that many bytes.
        """
        gathered = SparseAllreduce().cost(message_bytes, size, topology, network)
        if self.algorithm is not SparseAlgorithm.SCALABLE:
            return gathered
        return replace(gathered, memory=super().cost(message_bytes, size, topology, network).memory)

    def message_bytes(
        self, compressor: Compressor | None, shape: SegmentShape, size: int, network: NetworkModel
    ) -> float:
        """Return the bytes of a message whose gather would send as much as is sent, for the network planned with."""
        costs = self.costs or CostModel.of_network(network)
        return self._choice(compressor, shape, size, costs).as_gathered(size)

    def notes(
        self, compressor: Compressor | None, shapes: Sequence[SegmentShape], size: int, network: NetworkModel
    ) -> list[str]:
        """Return notes on the share sent sparse, and on the number of ranks from which dense is better."""
        from hocket_redsync.choosing import first_dense_size

        own, costs = _own(compressor), self.costs or CostModel.of_network(network)
        ways = [self._choice(own, shape, size, costs).way for shape in shapes]
        num_parameters = sum(len(shape.spans) for shape in shapes)
        num_dense = sum(len(way.dense) for way in ways)
        num_scalable = sum(
            len(shape.spans) - len(way.dense)
            for way, shape in zip(ways, shapes, strict=True)
            if way.algorithm is SparseAlgorithm.SCALABLE
        )
        scalable = "" if self.algorithm is SparseAlgorithm.GATHER else f" ({num_scalable} scalable)"
        first = first_dense_size(own, shapes, costs, self.algorithm)
        from_when = "for no number of ranks" if first is None else f"from {first} ranks on"
        return [
            f"redsync.allreduce among {size} ranks sends {num_parameters - num_dense} of {num_parameters} "
            f"parameters sparse{scalable} and {num_dense} dense. Sending all of them dense would be faster "
            f"{from_when}. This prediction includes the time of selection and decompression; the time above "
            "does not."
        ]


#: The costs without `auto`, which never reads them.
_FREE = CostModel(0.0, 0.0, 0.0, 0.0)


def _why_dense(own: ResidualCompressor, segments: Sequence[Segment], size: int) -> str:
    """Return the reason why nothing is compressed."""
    sizes = [span.numel * segment.dtype.itemsize for segment in segments for span in segment.spans]
    if all(nbytes < own.dense_below_kb * 1024 for nbytes in sizes):
        return (
            f"nothing is compressed, because all {len(sizes)} parameters are below "
            f"dense_below_kb={own.dense_below_kb:g}: the largest has {max(sizes) / 1024:.3g} KB. "
            "compressor.dense_below_kb sets the limit"
        )
    return (
        f"nothing is compressed, because among {size} ranks all {len(sizes)} parameters take less time "
        "uncompressed"
    )


def _own(compressor: Compressor | None) -> ResidualCompressor:
    """Return the compressor of RedSync that is within wrappers such as local clipping."""
    from hocket.api import Wrapper
    from hocket_redsync.residual import ResidualCompressor

    inner = compressor
    while isinstance(inner, Wrapper):
        inner = inner.compressor
    if not isinstance(inner, ResidualCompressor):
        raise ValueError(
            "redsync.allreduce works only with RedSync's compressors: use compressor redsync.hybrid, or collective "
            "sparse_allreduce"
        )
    return inner
