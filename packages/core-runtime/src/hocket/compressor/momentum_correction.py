"""Momentum correction: momentum is applied before sparsification, so that values sent late have the velocity that they
would have had. u is the velocity, g the gradient with weight decay in it, m the momentum: u <- m u + g, and u (with
Nesterov m u + g) is what the inner compressor gets, to accumulate and to send. With factor masking, u <- 0 where
something was sent, so that stale gradients do not carry the momentum on. Source: Y. Lin et al., "Deep Gradient
Compression", ICLR 2018, sections 3.1 (correction) and 3.2 (factor masking) and appendix B (Nesterov); RedSync, section
2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    State,
)
from hocket.compressor.checked import message_of
from hocket.compressor.wrapper import Wrapper, WrapperState, is_finite, refuse_transforms, with_state
from hocket.errors import HocketError

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.compressor.optimizer_terms import OptimizerTerms
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape


class _Velocity(WrapperState):
    """The velocity u and what the optimizer would do in this round."""

    def __init__(self, segment: Segment, inner: State) -> None:
        import torch

        super().__init__(inner)
        self.velocity = torch.zeros_like(segment.outgoing[: segment.numel])
        self.terms: Sequence[OptimizerTerms | None] = ()
        self.scale = 0.0

    @property
    def momentum(self) -> Tensor:
        return self.velocity

    def take(self, terms: Sequence[OptimizerTerms | None], scale: float) -> None:
        self.terms, self.scale = terms, scale

    def tensors(self) -> dict[str, Tensor]:
        return {"momentum": self.velocity, **super().tensors()}


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Momentum correction: momentum and weight decay of torch's SGD, applied before the inner compressor.

    Meant around `error_feedback`. The sum over ranks is the optimizer's own arithmetic: at density 1 and without
    masking the run is that of SGD with momentum, to rounding. At density 1 with masking it is plain SGD.

    After a backward `p.grad` holds the result of the velocity's exchange. Programs that read it between two backwards
    of a step (SAM, FGM, gradient surgery) want the gradient: leave momentum to the optimizer there, by `error_feedback`
    alone.

    Writes the velocity into `outgoing`, which for gradients is the exchange's own. A round with NaN or Inf in
    the gradients leaves the velocity as it was. Memory: one more copy of the segment's data.

    Attributes:
        masking: whether the velocity of the values that were sent is set to zero.

    Raises:
        ValueError: the inner compressor applies momentum too.
    """

    masking: bool = True

    def __post_init__(self) -> None:
        refuse_transforms(self.compressor, "momentum_correction")
        if self.compressor.traits.applies_optimizer_terms:
            raise ValueError("the compressor already applies momentum: leave one momentum_correction out")

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, applies_optimizer_terms=frozenset({"momentum", "weight_decay"}))

    def without_optimizer_terms(self) -> Compressor:
        return self.compressor

    def init(self, segment: Segment) -> State:
        return _Velocity(segment, self.compressor.init(segment))

    def compress(self, segment: Segment, state: _Velocity, round: int) -> Message:
        """Return the inner compressor's message of the velocity.

        Raises:
            HocketError: `State.take` was not called before.
        """
        import torch

        if len(state.terms) != len(segment.spans):
            raise HocketError(
                f"{segment.name}: compress was called before State.take, so the optimizer's momentum is not known: the "
                "collective must call State.take first"
            )
        if not is_finite(segment.outgoing[: segment.numel]):
            return message_of(self.compressor, segment, state.inner, round)
        with torch.no_grad():
            _accelerate(segment, state)
        segment.stage_out()
        message = message_of(self.compressor, segment, state.inner, round)
        if self.masking:
            if self.traits.selects:
                state.note_cleared(self.read(message).indices)
            self.clear_sent(message, state.velocity)
        return message

    def footprint(self, shape: SegmentShape) -> Footprint:
        return with_state(super().footprint(shape), shape.numel * shape.dtype.itemsize)


def _accelerate(segment: Segment, state: _Velocity) -> None:
    """Update the velocity and write it over the gradients, in the order of operations of torch's SGD."""
    from hocket.segment.segment import view_of

    for span, terms in zip(segment.spans, state.terms, strict=True):
        if terms is None:
            continue
        gradient, velocity = view_of(segment.outgoing, span), view_of(state.velocity, span)
        if terms.weight_decay:
            gradient.add_(terms.parameter.detach(), alpha=terms.weight_decay * state.scale)
        terms.accelerate(gradient, velocity)
