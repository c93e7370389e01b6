"""Compressors around another compressor that correct its input: error feedback, momentum correction, clipping.

Error feedback: unsent values stay, and are sent later. V is the residual, G a round's contribution, C the inner
compressor, D what receivers read from its message: V <- decay V + G, send C(V), V <- V - D(C(V)). Source: Fang et
al., "RedSync", algorithm 1; F. Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, section 3; S. P.
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, algorithm 2. In
the last the learning rate sits inside the residual; here, as in RedSync, it does not. A decay below 1 forgets values
that have waited long: A. Sarfi et al., "SparseLoCo", arXiv:2508.15706.

Momentum correction: momentum is applied before sparsification, so that values sent late have the velocity that they
would have had. u is the velocity, g the gradient with weight decay in it, m the momentum: u <- m u + g, and u (with
Nesterov m u + g) is what the inner compressor gets, to accumulate and to send. With factor masking, u <- 0 where
something was sent, so that stale gradients do not carry the momentum on. Source: Y. Lin et al., "Deep Gradient
Compression", ICLR 2018, sections 3.1 (correction) and 3.2 (factor masking) and appendix B (Nesterov); RedSync, section
2.4.

Local clipping: each rank clips its contribution before residuals are added. Source: Lin et al., section 3.1;
RedSync, section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.compressor.api import (
    Compressor,
    CompressorTraits,
    Footprint,
    Message,
    SparseValues,
    State,
    message_of,
)
from hocket.errors import HocketError

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.arrays import Array
    from hocket.compressor.optimizer_terms import OptimizerTerms
    from hocket.segment.segment import Segment
    from hocket.segment.shape import SegmentShape

__all__ = [
    "ErrorFeedback",
    "Identity",
    "LocalClipping",
    "MomentumCorrection",
    "Wrapper",
    "WrapperState",
]


@dataclass(frozen=True)
class Identity(Compressor):
    """The absence of compression, for wrappers: the message is the segment's own memory, without a copy."""

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
        compressor: gives the messages their form.
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


def _refuse_transforms(compressor: Compressor, name: str) -> None:
    """Refuse an inner compressor whose messages are in another basis."""
    if compressor.traits.transforms:
        raise ValueError(
            f"compressor sends its messages in another basis, where {name} cannot find the values: put {name} inside it"
        )


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
        _refuse_transforms(self.compressor, "error_feedback")
        if self.compressor.traits.keeps_residual:
            raise ValueError("compressor keeps a residual already: leave one error_feedback out")
        if self.compressor.traits.applies_optimizer_terms:
            raise ValueError(
                "compressor applies momentum, which belongs before what accumulates it: put error_feedback inside "
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
        return _with_state(super().footprint(shape), shape.wire_bytes)


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
        masking: whether the velocity is cleared where values were sent.

    Raises:
        ValueError: the inner compressor applies momentum too.
    """

    masking: bool = True

    def __post_init__(self) -> None:
        _refuse_transforms(self.compressor, "momentum_correction")
        if self.compressor.traits.applies_optimizer_terms:
            raise ValueError("compressor applies momentum already: leave one momentum_correction out")

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
            raise HocketError(f"{segment.name} is compressed before its optimizer's terms were taken")
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
        return _with_state(super().footprint(shape), shape.numel * shape.dtype.itemsize)


def _accelerate(segment: Segment, state: _Velocity) -> None:
    """Update the velocity and write it over the gradients, in the order of operations of torch's SGD."""
    from hocket.segment.segment import view_of

    for span, terms in zip(segment.spans, state.terms, strict=True):
        if terms is None:
            continue
        gradient, velocity = view_of(segment.outgoing, span), view_of(state.velocity, span)
        if terms.weight_decay:
            gradient.add_(terms.parameter, alpha=terms.weight_decay * state.scale)
        if not terms.momentum:
            continue
        if terms.continues:
            velocity.add_(gradient)
            if terms.nesterov:
                gradient.mul_(1 + terms.momentum)
            continue
        velocity.mul_(terms.momentum).add_(gradient)
        if terms.nesterov:
            gradient.add_(velocity, alpha=terms.momentum)
        else:
            gradient.copy_(velocity)


@dataclass(frozen=True)
class LocalClipping(Wrapper):
    """Local clipping: a rank's own gradients get a norm of at most `max_norm` * sqrt(N).

    N is the number of ranks.

    The mean of N independent gradients has 1/sqrt(N) of the norm of each, so that the mean's norm is then about
    `max_norm` at most. The papers say N^-1/2: of gradients that were divided by N already, which is the same.
    With one rank this is `torch.nn.utils.clip_grad_norm_`.

    It needs the gradients of all segments, so nothing can overlap backward. Gradients with NaN or Inf are left
    as they are. Each rank's norm is of what it contributes, weighted if it is.

    Attributes:
        max_norm: of the mean gradient over all segments, L2; finite and more than 0.

    Raises:
        ValueError: `max_norm` is not in its range.
    """

    max_norm: float

    def __post_init__(self) -> None:
        if not 0 < self.max_norm < math.inf:
            raise ValueError(f"max_norm must be finite and more than 0, not {self.max_norm}")

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, prepares=True)

    def prepare(self, segments: Sequence[Segment], round: int, size: int, scale: float) -> None:
        """Scale all segments' `outgoing` data down by one factor if their joint norm is too large."""
        if scale != 0:
            gradients = [segment.outgoing[: segment.numel] for segment in segments]
            norm = _norm(gradients)
            # The small number is torch's own, so that one rank clips as torch does.
            factor = self.max_norm * math.sqrt(size) / (norm / scale + 1e-6)
            if math.isfinite(norm) and factor < 1:
                for gradient in gradients:
                    _scale(gradient, factor)
        super().prepare(segments, round, size, scale)


def _norm(gradients: Sequence[Tensor]) -> float:
    """Return the joint L2 norm; not finite only if an element is not, or if float64 cannot hold it."""
    import torch

    def total(divisor: float) -> float:
        parts = (gradient if divisor == 1 else gradient / divisor for gradient in gradients)
        return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))

    norm = total(1.0)
    if math.isfinite(norm):
        return norm
    largest = max(float(gradient.abs().max()) for gradient in gradients)  # squares of float64 have overflowed
    return largest * total(largest) if math.isfinite(largest) else math.inf


def _scale(gradient: Tensor, factor: float) -> None:
    """Multiply by a factor, which the gradient's dtype may hold in a few bits only."""
    import torch

    if factor >= torch.finfo(gradient.dtype).tiny:
        gradient.mul_(factor)
    else:
        gradient.mul_(math.sqrt(factor)).mul_(math.sqrt(factor))


def _with_state(held: Footprint, nbytes: int) -> Footprint:
    """Return the inner compressor's footprint with `nbytes` more of state."""
    return replace(held, state_bytes=held.state_bytes + nbytes)


def is_finite(data: Tensor) -> bool:
    """Return whether all elements are finite."""
    # One pass, which a single NaN or Inf poisons; only then, or where finite numbers sum to Inf, one by one.
    return bool(data.sum().isfinite()) or bool(data.isfinite().all())
