"""The choice between sparse and dense for each parameter of a segment, and between gather and scalable exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hocket.api import ScalableChannel, SparseAlgorithm
from hocket_redsync.cost import CostModel
from hocket_redsync.message import MessageForm, content_bytes, message_bytes
from hocket_redsync.selection import Method

if TYPE_CHECKING:
    from hocket.api import SegmentShape
    from hocket_redsync.residual import ResidualCompressor
    from hocket_redsync.sending import Sending

# The largest number of ranks at which `plan` looks whether dense is better.
_MOST_RANKS = 1 << 14


class Way(NamedTuple):
    """The way that the parameters of one segment travel, the same on every rank.

    Attributes:
        dense: the positions of those that are summed by an allreduce.
        algorithm: `gather` or `scalable`, for the others.
    """

    dense: frozenset[int]
    algorithm: SparseAlgorithm


@dataclass(frozen=True)
class Choice:
    """A way, and its costs.

    Attributes:
        way: the way that parameters travel.
        bytes_to_each: bytes of sparse messages to each other rank, on average; 0 where nothing is sparse.
        reduced_bytes: bytes of dense parameters; 0 where nothing is dense.
        seconds: the time that the model predicts.
    """

    way: Way
    bytes_to_each: float
    reduced_bytes: float
    seconds: float

    def as_gathered(self, size: int) -> float:
        """Return the bytes of a message whose gather would have a rank send as much as this choice does."""
        return self.bytes_to_each + 2 / size * self.reduced_bytes


def num_selected(compressor: ResidualCompressor, shape: SegmentShape, dense: Collection[int]) -> float:
    """Return the elements of a segment's message on average, those of `dense` parameters left out."""
    pairs = enumerate(zip(compressor.sendings(shape), shape.spans, strict=True))
    return sum(sending.expected_count(span.numel) for i, (sending, span) in pairs if i not in dense)


def choose(
    compressor: ResidualCompressor,
    shape: SegmentShape,
    size: int,
    costs: CostModel,
    *,
    auto: bool,
    algorithm: SparseAlgorithm = SparseAlgorithm.GATHER,
) -> Choice:
    """Return the way that a segment's parameters travel.

    Args:
        compressor: gives each parameter's method.
        shape: the segment's.
        size: ranks.
        costs: the machine's.
        auto: true: each parameter travels by the way predicted to be cheaper; false: the compressor decides which are
            dense.
        algorithm: the algorithm for sparse ones; with `auto` the one predicted to be faster, if messages are elements.
    """
    sendings = compressor.sendings(shape)
    of_policy = frozenset(i for i, sending in enumerate(sendings) if sending.method is Method.DENSE)
    algorithms = [algorithm]
    if algorithm is SparseAlgorithm.AUTO:
        algorithms = [SparseAlgorithm.GATHER, SparseAlgorithm.SCALABLE][: 1 + compressor.traits.selects]
    ways = []
    for each in algorithms:
        ways.append(Way(of_policy, each))
        if auto:
            cheaper = frozenset(
                i
                for i, (sending, span) in enumerate(zip(sendings, shape.spans, strict=True))
                if i in of_policy or _saved(sending, span.numel, shape.dtype.itemsize, size, costs, each) <= 0
            )
            # Latencies are the segment's, so one way for all parameters may be cheaper than two.
            ways[-1:] = [
                Way(dense, each) for dense in (frozenset(range(len(sendings))), frozenset[int](), cheaper)
            ]
    choices = (_choice(compressor, shape, sendings, way, size, costs) for way in ways)
    return min(choices, key=lambda choice: choice.seconds)


def _sparse_seconds(
    sending: Sending, numel: int, itemsize: int, size: int, costs: CostModel, algorithm: SparseAlgorithm
) -> float:
    """Return the seconds of a sparse parameter, latencies aside."""
    sent = sending.expected_count(numel)
    selected = 0 if sending.form is MessageForm.DENSE else numel
    if algorithm is SparseAlgorithm.SCALABLE:
        nbytes = ScalableChannel.SHARES / size * content_bytes(MessageForm.SPARSE, sent, itemsize)
        return costs.sparse_seconds(selected, 2 * sent, nbytes, size)
    return costs.sparse_seconds(selected, size * sent, content_bytes(sending.form, sent, itemsize), size)


def _saved(
    sending: Sending, numel: int, itemsize: int, size: int, costs: CostModel, algorithm: SparseAlgorithm
) -> float:
    """Return the seconds, latencies aside, by which a parameter is cheaper to send sparse than dense."""
    sparse = _sparse_seconds(sending, numel, itemsize, size, costs, algorithm)
    return costs.dense_seconds(numel * itemsize, size) - sparse


def _choice(
    compressor: ResidualCompressor,
    shape: SegmentShape,
    sendings: Sequence[Sending],
    way: Way,
    size: int,
    costs: CostModel,
) -> Choice:
    itemsize, scalable = shape.dtype.itemsize, way.algorithm is SparseAlgorithm.SCALABLE
    contents, reduced, seconds, to_each = 0.0, 0.0, 0.0, 0.0
    for i, (sending, span) in enumerate(zip(sendings, shape.spans, strict=True)):
        if i in way.dense:
            reduced += span.numel * itemsize
            continue
        contents += content_bytes(sending.form, sending.expected_count(span.numel), itemsize)
        seconds += _sparse_seconds(sending, span.numel, itemsize, size, costs, way.algorithm)
    if len(way.dense) < len(sendings):
        seconds += costs.scalable_latency(size) if scalable else costs.gather_latency(size)
        to_each = message_bytes(shape, contents)
        if scalable:
            to_each = ScalableChannel.bytes_to_each(shape, num_selected(compressor, shape, way.dense), size)
    else:  # the whole segment travels, padding and trailer included
        reduced = (shape.numel + shape.trailer_numel) * itemsize
    if way.dense:
        seconds += costs.reduce_latency(size) + costs.dense_seconds(reduced, size)
    return Choice(way, to_each, reduced, seconds)


def _all_dense(compressor: ResidualCompressor, shape: SegmentShape, size: int, costs: CostModel) -> Choice:
    sendings = compressor.sendings(shape)
    way = Way(frozenset(range(len(sendings))), SparseAlgorithm.GATHER)
    return _choice(compressor, shape, sendings, way, size, costs)


def first_dense_size(
    compressor: ResidualCompressor,
    shapes: Sequence[SegmentShape],
    costs: CostModel,
    algorithm: SparseAlgorithm = SparseAlgorithm.GATHER,
) -> int | None:
    """Return the number of ranks from which a dense exchange is predicted to be cheaper; None for no number.

    The alternative is the compressor's own policy by that algorithm, over all segments together.
    """

    def sparse_pays(size: int) -> bool:
        together = sum(
            choose(compressor, shape, size, costs, auto=False, algorithm=algorithm).seconds
            for shape in shapes
        )
        dense = sum(_all_dense(compressor, shape, size, costs).seconds for shape in shapes)
        return together < dense

    if not sparse_pays(2):
        return 2
    low, high = 2, 4
    while sparse_pays(high):
        low, high = high, 2 * high
        if high > _MOST_RANKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sparse_pays(middle) else (low, middle)
    return high
