"""Values travel as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.compressor.api import Compressor, Message, SegmentShape, State
from hocket.compressor.shape import dtype_of, numel_of, trailer_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.segment.segment import Segment

__all__ = ["NoCompression"]


@dataclass(frozen=True)
class NoCompression(Compressor):
    """No compression: the message is the segment's own memory, without a copy."""

    @property
    def reducible(self) -> bool:
        return True

    def compress(self, segment: Segment, state: State, round: int) -> Message:
        """Return the outgoing values, which the caller has staged out, as they lie in host memory."""
        return Message(segment.outgoing_array, segment, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add weight * message to `out`, in the dtype of `out`."""
        import torch

        out.add_(torch.from_numpy(message.payload).to(out.device), alpha=weight)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        """Set everything to 0."""
        out.zero_()

    def payload_bytes(self, shape: SegmentShape) -> float:
        """Return the segment's own size."""
        return float(numel_of(shape) * dtype_of(shape).itemsize + trailer_bytes(shape))
