"""What a compressor is: the form in which a segment's values travel, and what it remembers between rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from hocket.segment import Segment
    from hocket.transport.peer import Array

__all__ = ["Compressor", "Message"]


@dataclass(frozen=True, eq=False)
class Message:
    """A segment's values as they travel.

    Attributes:
        payload: C-contiguous, in host memory; its dtype and shape are the compressor's. May be a view of the
            segment, so it is valid until the segment changes.
    """

    payload: Array


class Compressor(ABC):
    """In what form values travel; a frozen dataclass whose fields are its configuration.

    What one exchange remembers about one segment (residuals, momentum, cached thresholds) is the `state` that
    `init` makes and the caller keeps. A compressor that corrects another's error holds that other one in a
    field.
    """

    #: Whether messages of several ranks may be summed as they are, in flight (a cast), or each must arrive
    #: (sparse).
    reducible: ClassVar[bool]

    #: What the compressor takes over from the optimizer: of "momentum" and "weight_decay".
    takes: ClassVar[frozenset[str]] = frozenset()

    @property
    def prepares(self) -> bool:
        """Whether `prepare` must see all segments before the first is compressed, as local clipping does.

        A compressor that passes `prepare` on to one that it holds answers as that one does.
        """
        return type(self).prepare is not Compressor.prepare

    def init(self, segment: Segment) -> Any:
        """Return the state to keep for `segment`; None where there is nothing to remember."""
        return None

    # Empty on purpose: most compressors look at one segment at a time.
    def prepare(self, segments: Sequence[Segment], round: int) -> None:  # noqa: B027
        """Look at all segments, once per step and before any is compressed; may change their `outgoing`."""

    @abstractmethod
    def compress(self, segment: Segment, state: Any, round: int) -> Message:
        """Return what to send of `segment.outgoing` in this round, and update `state` in place."""

    @abstractmethod
    def accumulate(self, message: Message, weight: float, out: Array) -> None:
        """Add a message to `out`: out += weight * message.

        Args:
            message: this rank's or another's, as `compress` made it.
            weight: the message's share in the result.
            out: dense, [numel + num_companions], of the segment's dtype; changed in place.
        """

    @abstractmethod
    def message_bytes(self, segment_bytes: int) -> float:
        """Return the mean bytes of a message for a segment of `segment_bytes` bytes; for `plan`."""
