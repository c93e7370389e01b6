"""How large a segment's buffers are and what of them travels: pure, for sessions and for `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hocket.segment.partition import Span, partition
from hocket.segment.segment import wire_dtype
from hocket.strategy.exchange import GRADIENTS, Exchange, Overlap

__all__ = [
    "FIRST_PRESENCE",
    "NONFINITE",
    "WEIGHT",
    "Layout",
    "gradient_layout",
    "layouts",
    "parameter_layout",
]

#: The companions of a gradient segment, by their place behind the data: the rank's weight, whether it holds
#: NaN or Inf, and from `FIRST_PRESENCE` on one for each parameter, whether it had a gradient.
WEIGHT, NONFINITE, FIRST_PRESENCE = 0, 1, 2


@dataclass(frozen=True)
class Layout:
    """The buffers of one segment of one exchange.

    Attributes:
        spans: its parameters and their places.
        dtype: of the numbers on the wire.
        num_companions: numbers that travel behind the data.
        own_outgoing: whether what is sent has a buffer of its own, and is not sent from the parameters' own.
        casts: whether what came back is kept a second time, in the parameters' own dtype.
    """

    spans: tuple[Span, ...]
    dtype: torch.dtype
    num_companions: int
    own_outgoing: bool
    casts: bool

    @property
    def data_numel(self) -> int:
        """How many numbers of data it has, padding included."""
        return self.spans[-1].start + self.spans[-1].padded_numel

    @property
    def numel(self) -> int:
        """How many numbers travel."""
        return self.data_numel + self.num_companions

    @property
    def wire_bytes(self) -> int:
        """Bytes of what one rank contributes, uncompressed."""
        return self.numel * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers that the exchange allocates for it."""
        cast_bytes = self.data_numel * self.spans[0].dtype.itemsize if self.casts else 0
        return self.wire_bytes * (2 if self.own_outgoing else 1) + cast_bytes


def gradient_layout(spans: Sequence[Span]) -> Layout:
    """Lay out a segment of gradients."""
    dtype = wire_dtype(spans[0].dtype)
    return Layout(tuple(spans), dtype, FIRST_PRESENCE + len(spans), True, dtype != spans[0].dtype)


def parameter_layout(spans: Sequence[Span], overlap: Overlap) -> Layout:
    """Lay out a segment of parameters.

    Nothing writes the parameters while they are sent, so they are sent from where they are; but with overlap
    delayed the next step does.
    """
    dtype = wire_dtype(spans[0].dtype)
    return Layout(tuple(spans), dtype, 0, overlap is Overlap.DELAYED or dtype != spans[0].dtype, False)


def layouts(exchange: Exchange, spans: Sequence[Span]) -> list[Layout]:
    """Cut a model into the segments of an exchange.

    Args:
        exchange: what the strategy says.
        spans: the trainable parameters, in the model's order.
    """
    if exchange.slot == GRADIENTS:
        return [gradient_layout(cut) for cut in partition(spans, exchange.segments, backward=True)]
    return [parameter_layout(cut, exchange.overlap) for cut in partition(spans, exchange.segments)]
