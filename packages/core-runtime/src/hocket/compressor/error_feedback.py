"""What a compressor does not send stays, and is sent later.

V is the residual, G a round's contribution, C the compressor that is held: V <- V + G, send C(V), V <- V - C(V).

Source: Fang et al., "RedSync", algorithm 1; F. Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech
2014, section 3; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019, algorithm 2. In the last the learning rate sits inside the residual; here, as in RedSync,
it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hocket.compressor.api import Compressor, Message, SegmentShape, State
from hocket.compressor.shape import dtype_of, numel_of, trailer_bytes
from hocket.compressor.wrapper import Wrapper, WrapperState, is_finite

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.segment.segment import Segment

__all__ = ["ErrorFeedback"]


class _Feedback(WrapperState):
    """The residual V, in a segment of its own, so that the compressor that is held reads V as what goes out."""

    def __init__(self, segment: Segment, compressor: Compressor) -> None:
        import torch

        from hocket.segment.segment import Segment

        values = torch.zeros_like(segment.outgoing)
        # Nothing is received into it.
        self.carrier = Segment(segment.name, segment.index, segment.spans, values, values)
        super().__init__(compressor.init(self.carrier))

    @property
    def residual(self) -> Tensor:
        return self.carrier.outgoing[: self.carrier.numel]

    def tensors(self) -> dict[str, Tensor]:
        return {"residual": self.residual, **super().tensors()}


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Adds what was not sent to the next round's contribution.

    Nothing is lost: V before + G = V after + what was sent, bit for bit around a compressor that selects or that
    rounds to a shorter type. Memory: one more copy of the segment's data.

    A round with NaN or Inf in G is sent without V, and leaves V as it was.

    Raises:
        ValueError: the compressor that is held keeps a residual too, so that everything would be sent twice, or
            corrects momentum, which has to come before.
    """

    def __post_init__(self) -> None:
        if self.compressor.keeps_residual:
            raise ValueError("compressor keeps a residual already: leave one error_feedback out")
        if self.compressor.applies_optimizer_terms:
            raise ValueError(
                "compressor applies momentum, which belongs before what accumulates it: put error_feedback inside "
                "momentum_correction"
            )

    @property
    def keeps_residual(self) -> bool:
        return True

    def init(self, segment: Segment) -> State:
        return _Feedback(segment, self.compressor)

    def compress(self, segment: Segment, state: _Feedback, round: int) -> Message:
        """Return what the compressor that is held makes of the contribution and the residual together."""
        data = segment.outgoing[: segment.numel]
        if not is_finite(data):
            return self.compressor.compress(segment, state.inner, round)
        carrier = state.carrier
        state.residual.add_(data)
        carrier.outgoing_trailer[:] = segment.outgoing_trailer
        carrier.stage_out()
        payload = self.compressor.compress(carrier, state.inner, round).payload
        # A message without compression is a view of V, which must not change with it.
        if np.may_share_memory(payload, carrier.outgoing_array):
            payload = payload.copy()
        message = Message(payload, segment, round)
        self.compressor.accumulate(message, -1.0, carrier.outgoing)
        return message

    def state_bytes(self, shape: SegmentShape) -> int:
        residual_bytes = numel_of(shape) * dtype_of(shape).itemsize + trailer_bytes(shape)
        return residual_bytes + super().state_bytes(shape)
