"""Error feedback: unsent values stay, and are sent later. V is the residual, G a round's contribution, C the inner
compressor, D what receivers read from its message: V <- decay V + G, send C(V), V <- V - D(C(V)). Source: Fang et
al., "RedSync", algorithm 1; F. Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, section 3; S. P.
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, algorithm 2. In
the last the learning rate sits inside the residual; here, as in RedSync, it does not. A decay below 1 forgets values
that have waited long: A. Sarfi et al., "SparseLoCo", arXiv:2508.15706.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    State,
)
from hocket.compressor.checked import message_of
from hocket.compressor.wrapper import Wrapper, WrapperState, is_finite, refuse_transforms, with_state

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape


class _ErrorFeedbackState(WrapperState):
    """The residual V, in a segment of its own, which the inner compressor reads as outgoing."""

    def __init__(self, segment: Segment, compressor: Compressor) -> None:
        import torch

        from hocket.segment.segment import Segment

        values = torch.zeros_like(segment.outgoing)
        # Nothing is received into it.
        self.carrier = Segment(segment.name, segment.index, segment.spans, values, values)
        #: Where a round's messages are read from: the carrier, or the segment itself where that holds NaN or Inf.
        self.source = self.carrier
        super().__init__(compressor.init(self.carrier))

    @property
    def residual(self) -> Tensor:
        return self.carrier.outgoing[: self.carrier.numel]

    def take_back(self, indices: Array, values: Array) -> None:
        import torch

        residual = self.residual
        places, back = (torch.from_numpy(each).to(residual.device) for each in (indices, values))
        residual.index_add_(0, places, back)

    def tensors(self) -> dict[str, Tensor]:
        return {"residual": self.residual, **super().tensors()}


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Error feedback: unsent values are added to the next round's contribution.

    Nothing is lost: decay * V before + G = V after + what was sent, to rounding; with decay 1 bit for bit around a
    compressor that selects or that rounds to a shorter type. Memory: one more copy of the segment's data.

    A round with NaN or Inf in G is sent without V, and leaves V as it was.

    Attributes:
        decay: the factor of a residual in the next round, above 0 and at most 1.

    Raises:
        ValueError: decay is not in its range; the inner compressor keeps a residual too, so that all values would be
            sent twice, or corrects momentum, which has to be outside.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, not {self.decay}")
        refuse_transforms(self.compressor, "error_feedback")
        if self.compressor.traits.keeps_residual:
            raise ValueError("the compressor already keeps unsent values: leave one error_feedback out")
        if self.compressor.traits.applies_optimizer_terms:
            raise ValueError(
                "momentum must be applied before unsent values are kept: put error_feedback inside "
                "momentum_correction"
            )

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, keeps_residual=True)

    def init(self, segment: Segment) -> State:
        return _ErrorFeedbackState(segment, self.compressor)

    def compress(self, segment: Segment, state: _ErrorFeedbackState, round: int) -> Message:
        """Return the inner compressor's message of the contribution plus the residual."""
        import torch

        data = segment.outgoing[: segment.numel]
        state.source = carrier = state.carrier
        if not is_finite(data):
            state.source = segment
            return message_of(self.compressor, segment, state.inner, round)
        torch.add(data, state.residual, alpha=self.decay, out=state.residual)
        carrier.outgoing_trailer[:] = segment.outgoing_trailer
        carrier.stage_out()
        payload = message_of(self.compressor, carrier, state.inner, round).payload
        # A message without compression is a view of V, which must not change with it.
        if np.may_share_memory(payload, carrier.outgoing_array):
            payload = payload.copy()
        message = Message(payload, segment, round)
        if not self.traits.answers:
            self.compressor.accumulate(message, -1.0, carrier.outgoing)
        return message

    def answer(self, total: Message, segment: Segment, state: _ErrorFeedbackState) -> Message | None:
        """Return the inner compressor's next message, and remove what it sends from the residual."""
        message = self.compressor.answer(total, state.source, state.inner)
        if message is None:
            return None
        if state.source is state.carrier:
            if np.isfinite(message.payload).all():
                self.compressor.accumulate(message, -1.0, state.carrier.outgoing)
            else:  # another rank's: nothing has arrived, and the step will be left out
                state.residual.sub_(segment.outgoing[: segment.numel])
        return replace(message, segment=segment)

    def footprint(self, shape: SegmentShape) -> Footprint:
        return with_state(super().footprint(shape), shape.wire_bytes)
