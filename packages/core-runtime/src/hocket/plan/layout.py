"""Layouts: the sizes of a segment's buffers and messages; sessions allocate by them, plans count them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hocket.segment.partition import Fragments, ParameterSpan, partition
from hocket.segment.shape import SegmentShape, wire_dtype
from hocket.strategy.exchange import GRADIENTS, Exchange, Overlap

#: The trailer of a gradient segment, by index behind the data: the rank's weight, whether it holds
#: NaN or Inf, and from `FIRST_PRESENCE` on one for each parameter, whether it had a gradient. A segment of
#: parameters has its push-sum weight there, or what a distance from outer parameters counts; where ranks mix these,
#: they follow from `OUTER` on.
WEIGHT, NONFINITE, FIRST_PRESENCE = 0, 1, 2
OUTER = 1


@dataclass(frozen=True)
class Layout(SegmentShape):
    """The buffers of one segment of one exchange.

    Attributes:
        spans: its parameters and their offsets.
        trailer_numel: number of values that travel behind the data.
        own_outgoing: whether sent data have a buffer of their own, and are not sent from the parameters' memory.
        own_incoming: whether results have another buffer than sent data.
        casts: whether results are kept a second time, in the parameters' own dtype.
        num_kept: number of values kept besides each parameter, in the dtype of the wire.
    """

    spans: tuple[ParameterSpan, ...]
    trailer_numel: int
    own_outgoing: bool
    own_incoming: bool
    casts: bool
    num_kept: int = 0

    @property
    def wire_numel(self) -> int:
        """Return the number of values that travel, the trailer included."""
        return self.numel + self.trailer_numel

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the exchange keeps for it beside the buffers of its messages."""
        cast_bytes = self.numel * self.spans[0].dtype.itemsize if self.casts else 0
        return cast_bytes + self.numel * self.dtype.itemsize * self.num_kept


def buffers_of(
    exchange: Exchange, layouts: Sequence[Layout], owns: Sequence[bool]
) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the buffers of one kind, sent or received: the layouts that use each, and its length.

    Args:
        exchange: where its segments take turns, they share two buffers of each dtype and device.
        layouts: of the segments that a rank exchanges.
        owns: of each, whether it has a buffer of this kind.

    Yields:
        The layouts' numbers, and a number of elements.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, layout in enumerate(layouts):
        if owns[number]:
            span = layout.spans[0]
            key = (span.dtype, span.device) if exchange.takes_turns else (number,)
            alike.setdefault(key, []).append(number)
    for numbers in alike.values():
        longest = max(layouts[number].wire_numel for number in numbers)
        for first in range(min(2, len(numbers))):
            yield numbers[first::2], longest


def buffer_bytes(exchange: Exchange, layouts: Sequence[Layout]) -> int:
    """Return the bytes of the buffers of an exchange's messages, for the segments that a rank exchanges."""
    kinds = ([each.own_outgoing for each in layouts], [each.own_incoming for each in layouts])
    return sum(
        longest * layouts[numbers[0]].dtype.itemsize
        for owns in kinds
        for numbers, longest in buffers_of(exchange, layouts, owns)
    )


def gradient_layout(spans: Sequence[ParameterSpan], in_place: bool = False) -> Layout:
    """Lay out a segment of gradients.

    Args:
        spans: its parameters and their offsets.
        in_place: whether results overwrite the sent data.
    """
    dtype = wire_dtype(spans[0].dtype)
    return Layout(
        spans=tuple(spans),
        trailer_numel=FIRST_PRESENCE + len(spans),
        own_outgoing=True,
        own_incoming=not in_place,
        casts=dtype != spans[0].dtype,
    )


def parameter_layout(
    spans: Sequence[ParameterSpan], exchange: Exchange, shared: bool = False, *, in_pieces: bool = False
) -> Layout:
    """Lay out a segment of parameters.

    Parameters are sent from their own memory if no one writes them meanwhile. They need a buffer with a delay, as the
    next step writes them; with push-sum, whose weight travels behind them; with outer parameters, whose distances are
    sent; and as fragments, which lie in pieces. With overlap none no one reads them either, so results may overwrite
    them; with overlap forward they do in shared memory, where another buffer costs a copy of the model.

    Args:
        spans: its parameters and their offsets.
        exchange: the strategy's exchange.
        shared: whether the ranks' parameters lie in memory that all of them share.
        in_pieces: whether each parameter lies in memory of its own, as shards do.
    """
    dtype = wire_dtype(spans[0].dtype)
    outer, weighted = exchange.outer, exchange.carries_weight
    casts = dtype != spans[0].dtype
    in_pieces = in_pieces or isinstance(exchange.segments, Fragments)
    own = bool(weighted or outer or exchange.delay or casts or in_pieces or not exchange.merge.takes_all)
    unread = exchange.overlap is Overlap.NONE or (exchange.overlap is Overlap.FORWARD and shared)
    # Sent distances from outer parameters are of no use once they have arrived.
    in_place = (outer is not None or (unread and not own)) and exchange.collective.in_place(
        exchange.choices, shared
    )
    num_kept = int(weighted and casts)
    trailer_numel = int(weighted)
    if outer is not None:
        trailer_numel = OUTER + outer.mixes * (spans[-1].start + spans[-1].padded_numel)
        num_kept += 1 + len(outer.remembers) + exchange.keeps_sent
    return Layout(
        spans=tuple(spans),
        trailer_numel=trailer_numel,
        own_outgoing=own,
        own_incoming=not in_place,
        casts=False,
        num_kept=num_kept,
    )


def layouts(
    exchange: Exchange,
    spans: Sequence[ParameterSpan],
    *,
    alone: bool = True,
    shared: bool = False,
    in_pieces: bool = False,
) -> list[Layout]:
    """Cut a model into the segments of an exchange.

    Args:
        exchange: the strategy's exchange.
        spans: the trainable parameters, in the model's order.
        alone: whether it is the only one of its slot.
        shared: whether the ranks' segments lie in memory that all of them share.
        in_pieces: whether each parameter lies in memory of its own, as shards do.
    """
    if exchange.slot == GRADIENTS:
        in_place = alone and exchange.collective.in_place(exchange.choices, shared)
        return [gradient_layout(cut, in_place) for cut in partition(spans, exchange.segments, backward=True)]
    shared = shared and not in_pieces
    cuts = partition(spans, exchange.segments)
    return [parameter_layout(cut, exchange, shared, in_pieces=in_pieces) for cut in cuts]
