"""Values travel as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.compressor.api import Compressor, Message

if TYPE_CHECKING:
    from hocket.segment import Segment
    from hocket.transport.peer import Array

__all__ = ["NoCompression"]


@dataclass(frozen=True)
class NoCompression(Compressor):
    """No compression: the message is the segment's own memory, without a copy."""

    reducible: ClassVar[bool] = True

    def compress(self, segment: Segment, state: Any, round: int) -> Message:
        """Return the outgoing values, which the caller has staged out, as they lie in host memory."""
        return Message(segment.outgoing_array)

    def accumulate(self, message: Message, weight: float, out: Array) -> None:
        """Add weight * message to `out`, in the dtype of `out`."""
        out += weight * message.payload

    def message_bytes(self, segment_bytes: int) -> float:
        """Return the segment's own size."""
        return float(segment_bytes)
