"""A compressor that holds a compressor: it passes on everything, and a subclass changes what it corrects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hocket.compressor.api import Compressor, Message, SegmentShape, State

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.compressor.optimizer_terms import OptimizerTerms
    from hocket.segment.segment import Segment

__all__ = ["Wrapper", "WrapperState", "is_finite"]


class WrapperState(State):
    """The state of a compressor that holds another: by itself, the other's.

    Attributes:
        inner: the state of the compressor that is held.
    """

    def __init__(self, inner: State) -> None:
        self.inner = inner

    @property
    def residual(self) -> Tensor | None:
        return self.inner.residual

    @property
    def momentum(self) -> Tensor | None:
        return self.inner.momentum

    def tensors(self) -> dict[str, Tensor]:
        """Return the other's tensors, their names prefixed; a subclass adds its own."""
        return {f"compressor.{name}": tensor for name, tensor in self.inner.tensors().items()}


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Base of compressors that correct what goes into another, or into which it goes.

    Attributes:
        compressor: gives the messages their form.
    """

    compressor: Compressor

    @property
    def reducible(self) -> bool:
        return self.compressor.reducible

    @property
    def equal_sizes(self) -> bool:
        return self.compressor.equal_sizes

    @property
    def applies_optimizer_terms(self) -> frozenset[str]:
        return self.compressor.applies_optimizer_terms

    def without_optimizer_terms(self) -> Compressor:
        return replace(self, compressor=self.compressor.without_optimizer_terms())

    @property
    def same_coordinates(self) -> bool:
        return self.compressor.same_coordinates

    @property
    def keeps_residual(self) -> bool:
        return self.compressor.keeps_residual

    @property
    def prepares(self) -> bool:
        return self.compressor.prepares

    def init(self, segment: Segment) -> State:
        return WrapperState(self.compressor.init(segment))

    def take(
        self, segment: Segment, state: Any, terms: Sequence[OptimizerTerms | None], scale: float
    ) -> None:
        self.compressor.take(segment, state.inner, terms, scale)

    def prepare(self, segments: Sequence[Segment], round: int, size: int, scale: float) -> None:
        self.compressor.prepare(segments, round, size, scale)

    def compress(self, segment: Segment, state: Any, round: int) -> Message:
        return self.compressor.compress(segment, state.inner, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        self.compressor.accumulate(message, weight, out)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        self.compressor.clear_sent(message, out)

    def payload_bytes(self, shape: SegmentShape) -> float:
        return self.compressor.payload_bytes(shape)

    def max_payload_bytes(self, shape: SegmentShape) -> int:
        return self.compressor.max_payload_bytes(shape)

    def state_bytes(self, shape: SegmentShape) -> int:
        return self.compressor.state_bytes(shape)


def is_finite(data: Tensor) -> bool:
    """Return whether no element is NaN or Inf."""
    # One pass, which a single NaN or Inf poisons; only then, or where finite numbers sum to Inf, one by one.
    return bool(data.sum().isfinite()) or bool(data.isfinite().all())
