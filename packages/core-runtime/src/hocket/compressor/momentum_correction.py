"""Momentum is applied before sparsification, so that what is sent late has the velocity that it would have had.

u is the velocity, g the gradient with weight decay in it, m the momentum: u <- m u + g, and u (with Nesterov
m u + g) is what the compressor that is held gets, to accumulate and to send. With factor masking, u <- 0 where
something was sent, so that stale gradients do not carry the momentum on.

Source: Y. Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1 (correction) and 3.2 (factor
masking) and appendix B (Nesterov); Fang et al., "RedSync", section 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.compressor.api import Compressor, Message, SegmentShape, State
from hocket.compressor.shape import dtype_of, numel_of
from hocket.compressor.wrapper import Wrapper, WrapperState, is_finite
from hocket.errors import HocketError

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.compressor.optimizer_terms import OptimizerTerms
    from hocket.segment.segment import Segment

__all__ = ["MomentumCorrection"]


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

    def tensors(self) -> dict[str, Tensor]:
        return {"momentum": self.velocity, **super().tensors()}


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Takes over momentum and weight decay of torch's SGD, and hands the velocity to the compressor it holds.

    Meant around `error_feedback`. The sum over ranks is the optimizer's own arithmetic: at density 1 and without
    masking the run is that of SGD with momentum, to rounding. At density 1 with masking it is plain SGD.

    Writes the velocity into `outgoing`, which for gradients is the exchange's own. A round with NaN or Inf in
    the gradients leaves the velocity as it was. Memory: one more copy of the segment's data.

    Attributes:
        masking: whether the velocity is cleared where something was sent.

    Raises:
        ValueError: the compressor that is held applies momentum too.
    """

    masking: bool = True

    def __post_init__(self) -> None:
        if self.compressor.applies_optimizer_terms:
            raise ValueError("compressor applies momentum already: leave one momentum_correction out")

    @property
    def applies_optimizer_terms(self) -> frozenset[str]:
        return frozenset({"momentum", "weight_decay"})

    def without_optimizer_terms(self) -> Compressor:
        return self.compressor

    def init(self, segment: Segment) -> State:
        return _Velocity(segment, self.compressor.init(segment))

    def take(
        self, segment: Segment, state: _Velocity, terms: Sequence[OptimizerTerms | None], scale: float
    ) -> None:
        state.terms, state.scale = terms, scale

    def compress(self, segment: Segment, state: _Velocity, round: int) -> Message:
        """Return what the compressor that is held makes of the velocity.

        Raises:
            HocketError: `take` was not called before.
        """
        import torch

        if len(state.terms) != len(segment.spans):
            raise HocketError(f"{segment.name} is compressed before its optimizer's terms were taken")
        if not is_finite(segment.outgoing[: segment.numel]):
            return self.compressor.compress(segment, state.inner, round)
        with torch.no_grad():
            _accelerate(segment, state)
        segment.stage_out()
        message = self.compressor.compress(segment, state.inner, round)
        if self.masking:
            self.clear_sent(message, state.velocity)
        return message

    def state_bytes(self, shape: SegmentShape) -> int:
        return numel_of(shape) * dtype_of(shape).itemsize + super().state_bytes(shape)


def _accelerate(segment: Segment, state: _Velocity) -> None:
    """Update the velocity and write it where the gradients are, in the order of operations of torch's SGD."""
    from hocket.segment.segment import view_of

    for span, terms in zip(segment.spans, state.terms, strict=True):
        if terms is None:
            continue
        gradient, velocity = view_of(segment.outgoing, span), view_of(state.velocity, span)
        if terms.weight_decay:
            gradient.add_(terms.parameter, alpha=terms.weight_decay * state.scale)
        if not terms.momentum:
            continue
        velocity.mul_(terms.momentum).add_(gradient)
        if terms.nesterov:
            gradient.add_(velocity, alpha=terms.momentum)
        else:
            gradient.copy_(velocity)
