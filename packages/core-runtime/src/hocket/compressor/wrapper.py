"""The base of compressors around another one, and the absence of compression that one may be around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    SparseValues,
    State,
)
from hocket.compressor.checked import message_of

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.compressor.optimizer_terms import OptimizerTerms
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape


@dataclass(frozen=True)
class Identity(Compressor):
    """The compressor that compresses nothing, for use inside wrappers; it sends a segment without a copy."""

    @property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(reducible=True)

    def compress(self, segment: Segment, state: State, round: int) -> Message:
        """Return the outgoing values, which the caller has staged out, as they lie in host memory."""
        return Message(segment.outgoing_array, segment, round)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        """Add weight * message to `out`, in the dtype of `out`."""
        import torch

        out.add_(torch.from_numpy(message.payload).to(out.device), alpha=weight)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        """Set all elements to 0."""
        out.zero_()

    def footprint(self, shape: SegmentShape) -> Footprint:
        """Return the segment's own size."""
        return Footprint.of(shape.wire_bytes)


class WrapperState(State):
    """The state of a wrapper: by itself, the inner compressor's.

    Attributes:
        inner: the inner compressor's state.
    """

    def __init__(self, inner: State) -> None:
        self.inner = inner

    @property
    def residual(self) -> Tensor | None:
        return self.inner.residual

    @property
    def momentum(self) -> Tensor | None:
        return self.inner.momentum

    def take(self, terms: Sequence[OptimizerTerms | None], scale: float) -> None:
        self.inner.take(terms, scale)

    def take_back(self, indices: Array, values: Array) -> None:
        super().take_back(indices, values)
        self.inner.take_back(indices, values)

    def tensors(self) -> dict[str, Tensor]:
        """Return the inner state's tensors, with prefixed names; a subclass adds its own."""
        return {f"compressor.{name}": tensor for name, tensor in self.inner.tensors().items()}


@dataclass(frozen=True)
class Wrapper(Compressor):
    """The base of compressors around another one.

    Attributes:
        compressor: the compressor that makes the messages.
    """

    compressor: Compressor

    @property
    def traits(self) -> CompressorTraits:
        return self.compressor.traits

    def without_optimizer_terms(self) -> Compressor:
        return replace(self, compressor=self.compressor.without_optimizer_terms())

    def init(self, segment: Segment) -> State:
        return WrapperState(self.compressor.init(segment))

    def prepare(self, segments: Sequence[Segment], round: int, size: int, scale: float) -> None:
        self.compressor.prepare(segments, round, size, scale)

    def compress(self, segment: Segment, state: Any, round: int) -> Message:
        return message_of(self.compressor, segment, state.inner, round)

    def answer(self, total: Message, segment: Segment, state: Any) -> Message | None:
        return self.compressor.answer(total, segment, state.inner)

    def accumulate(self, message: Message, weight: float, out: Tensor) -> None:
        self.compressor.accumulate(message, weight, out)

    def read(self, message: Message) -> SparseValues:
        return self.compressor.read(message)

    def num_selected(self, shape: SegmentShape) -> float:
        return self.compressor.num_selected(shape)

    def to_values(self, segment: Segment, sums: Tensor) -> None:
        self.compressor.to_values(segment, sums)

    def clear_sent(self, message: Message, out: Tensor) -> None:
        self.compressor.clear_sent(message, out)

    def footprint(self, shape: SegmentShape) -> Footprint:
        return self.compressor.footprint(shape)


def refuse_transforms(compressor: Compressor, name: str) -> None:
    """Refuse an inner compressor whose messages are in another basis."""
    if compressor.traits.transforms:
        raise ValueError(
            f"the compressor transforms values before it sends them, so {name} cannot find them: put {name} inside it"
        )


def with_state(held: Footprint, nbytes: int) -> Footprint:
    """Return the inner compressor's footprint with `nbytes` more of state."""
    return replace(held, state_bytes=held.state_bytes + nbytes)


def is_finite(data: Tensor) -> bool:
    """Return whether all elements are finite."""
    # One pass, which a single NaN or Inf poisons; only then, or where finite numbers sum to Inf, one by one.
    return bool(data.sum().isfinite()) or bool(data.isfinite().all())
