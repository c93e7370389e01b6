"""Casts to two bytes: values travel in two bytes each, and are summed in four."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    State,
)
from hocket.errors import NonFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape

_ITEM_BYTES = 2

#: torch widens what it adds into a buffer of its own: one of this many elements stays in the cache, which makes the
#: sum of 25 M elements seven times faster (55 ms and 7.4).
_CHUNK = 1 << 18


class _CastState(State):
    """The message's memory: fresh pages each round would cost as much as the cast itself."""

    def __init__(self, nbytes: int) -> None:
        self.payload: Array = np.empty(nbytes, dtype=np.uint8)


@dataclass(frozen=True)
class _Cast(Compressor):
    """A cast to a type of two bytes, rounded to nearest even.

    The payload is uint8: the trailer in the segment's dtype, then the values in the narrow one.

    Not reducible, though they are numbers: MPI would sum float16 in float16, and does not know bfloat16. Each
    message arrives, and is added in float32 or better.
    """

    type_name: ClassVar[str]

    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=False)

    def init(self, segment: Segment) -> State:
        return _CastState(self.footprint(segment).longest_bytes)

    def compress(self, segment: Segment, state: _CastState, round: int) -> Message:
        """Return the outgoing values, rounded.

        Raises:
            NonFiniteError: a finite value is too large for the type and would have become Inf; names its
                parameter. NaN and Inf themselves pass.
        """
        trailer, values = self._parts(state.payload, segment)
        trailer[:] = segment.outgoing_trailer
        data = segment.outgoing[: segment.numel]
        values.copy_(data)
        self._refuse_overflow(segment, data)
        return Message(state.payload, segment, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add weight * message to `out`, in the dtype of `out`."""
        import torch

        trailer, values = self._parts(message.payload, message.segment)
        numel = message.segment.numel
        for chunk, part in zip(out[:numel].split(_CHUNK), values.to(out.device).split(_CHUNK), strict=True):
            chunk.add_(part, alpha=weight)
        out[numel:].add_(torch.from_numpy(trailer).to(out.device), alpha=weight)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        """Set all elements to 0, as all were sent; the rounding error is dropped."""
        out.zero_()

    def footprint(self, shape: SegmentShape) -> Footprint:
        """Return two bytes per value, and the trailer; the message's memory is kept."""
        nbytes = shape.trailer_bytes + shape.numel * _ITEM_BYTES
        return Footprint.of(nbytes, state_bytes=nbytes)

    def _type(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.type_name)
        return dtype

    def _parts(self, payload: Array, segment: Segment) -> tuple[Array, Tensor]:
        """Return views of a payload: the trailer and the values."""
        import torch

        end = segment.trailer_bytes
        trailer = payload[:end].view(segment.outgoing_array.dtype)
        # NumPy has no bfloat16, and torch changes no element size where there is no element.
        return trailer, torch.from_numpy(payload[end:].view(np.int16)).view(self._type())

    def _refuse_overflow(self, segment: Segment, data: Tensor) -> None:
        import torch

        if data.numel() == 0:
            return
        # One pass, in which NaN wins and fails the comparison too; only then each parameter on its own.
        limit = torch.finfo(self._type()).max
        low, high = torch.aminmax(data)
        if -limit <= low.item() and high.item() <= limit:
            return
        for span in segment.spans:
            given = data[span.start : span.stop]
            overflows = given.to(self._type()).isinf() & given.isfinite()
            if bool(overflows.any()):
                largest = given[overflows].abs().max().item()
                raise NonFiniteError(
                    f"{span.name}: {largest:g} does not fit {self.type_name}, whose largest number is {limit:g}: "
                    "use compressor bf16, or none"
                )


@dataclass(frozen=True)
class Float16(_Cast):
    """IEEE half precision: 11 bits of precision, 6e-8 to 65504; larger values are an error, not Inf."""

    type_name: ClassVar[str] = "float16"


@dataclass(frozen=True)
class BFloat16(_Cast):
    """The upper half of a float32: 8 bits of precision, with nearly float32's range."""

    type_name: ClassVar[str] = "bfloat16"
