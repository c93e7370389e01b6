"""The choice between sparse and dense for each parameter of a segment: one gather, or an allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.api import dtype_of, numel_of
from hocket_redsync.cost import CostModel
from hocket_redsync.message import Form, content_bytes, message_bytes
from hocket_redsync.selection import Method

if TYPE_CHECKING:
    from hocket.api import SegmentShape
    from hocket_redsync.part import Sending
    from hocket_redsync.residual import ResidualCompressor

__all__ = ["Choice", "choose", "first_dense_size"]

# `plan` looks for the number of ranks from which dense is better up to here.
_MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class Choice:
    """How the parameters of one segment travel.

    Attributes:
        dense: the positions of those that are summed by an allreduce; the others are gathered.
        gathered_bytes: of a rank's message, on average; 0 where nothing is gathered.
        reduced_bytes: of what is summed; 0 where nothing is.
        seconds: that the model predicts.
    """

    dense: frozenset[int]
    gathered_bytes: float
    reduced_bytes: float
    seconds: float

    def as_gathered(self, size: int) -> float:
        """Return the bytes of a message whose gather would have a rank send as much as this choice does."""
        return self.gathered_bytes + 2 / size * self.reduced_bytes


def choose(
    compressor: ResidualCompressor, shape: SegmentShape, size: int, costs: CostModel, *, auto: bool
) -> Choice:
    """Return how a segment's parameters travel.

    Args:
        compressor: says how each would be sent.
        shape: the segment's.
        size: ranks.
        costs: of the machine.
        auto: whether each parameter travels as is predicted to be cheaper; if not, those are dense that the
            compressor sends dense.
    """
    sendings = compressor.sendings(shape)
    of_policy = frozenset(i for i, sending in enumerate(sendings) if sending.method is Method.DENSE)
    if not auto:
        return _choice(shape, sendings, of_policy, size, costs)
    cheaper = frozenset(
        i
        for i, (sending, span) in enumerate(zip(sendings, shape.spans, strict=True))
        if i in of_policy or _saved(sending, span.numel, dtype_of(shape).itemsize, size, costs) <= 0
    )
    # Latencies are the segment's: one way for all may be cheaper than two.
    ways = (frozenset(range(len(sendings))), frozenset[int](), cheaper)
    return min(
        (_choice(shape, sendings, dense, size, costs) for dense in ways), key=lambda choice: choice.seconds
    )


def _saved(sending: Sending, numel: int, itemsize: int, size: int, costs: CostModel) -> float:
    """Return the seconds, latencies aside, by which a parameter is cheaper to send sparse than dense."""
    sent = sending.expected_count(numel)
    sparse = costs.sparse_seconds(numel, sent, content_bytes(sending.form, sent, itemsize), size)
    return costs.dense_seconds(numel * itemsize, size) - sparse


def _choice(
    shape: SegmentShape, sendings: Sequence[Sending], dense: frozenset[int], size: int, costs: CostModel
) -> Choice:
    itemsize = dtype_of(shape).itemsize
    gathered, reduced, seconds = 0.0, 0.0, 0.0
    for i, (sending, span) in enumerate(zip(sendings, shape.spans, strict=True)):
        if i in dense:
            reduced += span.numel * itemsize
            continue
        sent = sending.expected_count(span.numel)
        nbytes = content_bytes(sending.form, sent, itemsize)
        gathered += nbytes
        selected = 0 if sending.form is Form.DENSE else span.numel
        seconds += costs.sparse_seconds(selected, sent, nbytes, size)
    if len(dense) < len(sendings):
        seconds += costs.gather_latency(size)
        gathered = message_bytes(shape, gathered)
    else:  # the whole segment travels, padding and trailer included
        reduced = (numel_of(shape) + shape.trailer_numel) * itemsize
    if dense:
        seconds += costs.reduce_latency(size) + costs.dense_seconds(reduced, size)
    return Choice(dense, gathered, reduced, seconds)


def _all_dense(compressor: ResidualCompressor, shape: SegmentShape, size: int, costs: CostModel) -> Choice:
    return _choice(shape, compressor.sendings(shape), frozenset(range(len(shape.spans))), size, costs)


def first_dense_size(
    compressor: ResidualCompressor, shapes: Sequence[SegmentShape], costs: CostModel
) -> int | None:
    """Return from how many ranks on sending everything dense is predicted to be cheaper; None for no number.

    Against what the compressor sends by its own policy, all segments together.
    """

    def sparse_pays(size: int) -> bool:
        together = sum(choose(compressor, shape, size, costs, auto=False).seconds for shape in shapes)
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
