"""The gradients' moment: from autograd's hooks to `p.grad` holding what the strategy makes of all ranks' gradients.

When a parameter's gradient is in, its hook copies it, scaled, into the segment that will be sent and lets go of it;
when `backward()` ends, `p.grad` is bound to a view of what came back. With overlap backward a segment is sent as
soon as its last gradient is in; with overlap none all are sent when backward has ended.

Behind a segment's data travel a few companions through the same linear combination: the rank's weight, whether it
holds NaN or Inf, and for each parameter whether it had a gradient. So a mean over ranks with different weights (0
for one that is out of data) is right, and a parameter without gradient on every rank keeps `grad None`, as the
optimizer expects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hocket.errors import AttachError, HocketError
from hocket.segment.partition import Span
from hocket.segment.segment import Segment, allocate, view_of
from hocket.session.autograd import at_end_of_backward, current_backward, is_nested_backward
from hocket.session.exchanging import OpenExchange
from hocket.session.layout import FIRST_PRESENCE, NONFINITE, WEIGHT, gradient_layout
from hocket.session.weights import NOTHING, Contribution
from hocket.strategy.exchange import Overlap
from hocket.transport.peer import Peer

__all__ = ["GradientMoment", "gradient_segment"]

# A mean of weights that is this close to 1 is 1: a third, three times, is not.
_WEIGHT_TOLERANCE = 1e-6


def gradient_segment(name: str, index: int, spans: Sequence[Span], peer: Peer) -> Segment:
    """Allocate the buffers of a gradient segment, with its companions."""
    layout = gradient_layout(spans)
    outgoing, incoming = (allocate(peer, layout.numel, layout.dtype, spans[0].device) for _ in range(2))
    return Segment(name, index, spans, outgoing, incoming)


class _Gradient:
    """One parameter's places: where its gradient is sent from, and what `p.grad` is bound to."""

    __slots__ = ("arrived", "hook", "name", "outgoing", "parameter", "place", "position", "result")

    def __init__(self, name: str, parameter: nn.Parameter, place: _Place, position: int) -> None:
        span = place.segment.spans[position]
        self.name = name
        self.parameter = parameter
        self.place = place
        self.position = position
        self.outgoing = view_of(place.segment.outgoing, span)
        self.result = view_of(place.results, span)
        self.arrived = False


class _Place:
    """A segment's state within one backward."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.gradients: list[_Gradient] = []
        self.missing = 0
        # 1 for each parameter that has a gradient in this round, else 0.
        self.present = np.zeros(len(segment.spans), dtype=segment.outgoing_array.dtype)
        dtype = segment.spans[0].dtype
        # float16 and bfloat16 gradients are summed in float32, and handed to the optimizer in their own dtype.
        self.casts = segment.incoming.dtype != dtype
        data = segment.incoming[: segment.numel]
        self.results = torch.empty_like(data, dtype=dtype) if self.casts else data


class GradientMoment:
    """Hooks, sends and binds the gradients of one model.

    Args:
        model_parameters: the trainable parameters by name.
        opened: the slot's exchange, over more than one rank.
        contribution: what this rank puts into the step's mean; asked for once per backward.
        check: raises where the parameters are no longer what they were; called once per backward.
    """

    def __init__(
        self,
        model_parameters: dict[str, nn.Parameter],
        opened: OpenExchange,
        contribution: Callable[[], Contribution],
        check: Callable[[], None],
    ) -> None:
        self._open = opened
        self._contribution_of_step = contribution
        self._contribution = NOTHING
        self._check = check
        self._early = opened.exchange.overlap is Overlap.BACKWARD
        self._places = [_Place(segment) for segment in opened.segments]
        self._backward: int | None = None
        self._factor = 0.0
        self.accumulating = False
        #: How many backwards of this step ended with an exchange.
        self.exchanged_in_step = 0
        #: The parameters of this rank's last contribution that held NaN or Inf.
        self.nonfinite: list[str] = []
        #: How many ranks' last contributions held NaN or Inf.
        self.nonfinite_anywhere = False
        self._handles: list[Any] = []
        for place in self._places:
            for position, span in enumerate(place.segment.spans):
                gradient = _Gradient(span.name, model_parameters[span.name], place, position)
                place.gradients.append(gradient)
                self._handles.append(
                    gradient.parameter.register_post_accumulate_grad_hook(_hook_for(gradient, self._arrived))
                )

    def _arrived(self, gradient: _Gradient) -> None:
        """Take over a gradient that backward has just finished."""
        if self.accumulating:
            return
        if current_backward() != self._backward:
            self._begin_backward()
        place = gradient.place
        self._contribute(gradient)
        # Freed at once, so that backward can reuse the memory; bound again when backward ends.
        gradient.parameter.grad = None
        place.missing -= 1
        if self._early and place.missing == 0:
            self._send(place)
        self._open.progress.advance()

    def _begin_backward(self) -> None:
        if is_nested_backward():
            raise AttachError(
                "a backward was called inside another one (checkpoint with use_reentrant=True?): nobody can tell "
                "when gradients are complete. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), "
                "which gives the same gradients"
            )
        if not self._open.idle:
            raise HocketError(
                "the last backward() failed after it had begun to send gradients: this rank cannot go on training "
                "with the others"
            )
        self._check()
        self._backward = current_backward()
        self._begin_round(self._contribution_of_step())
        at_end_of_backward(self._end_backward)

    def _begin_round(self, contribution: Contribution) -> None:
        self._contribution = contribution
        self._factor = contribution.factor * self._open.scale
        self.nonfinite = []
        for place in self._places:
            place.missing = len(place.gradients)
            place.present[:] = 0
            for gradient in place.gradients:
                gradient.arrived = False

    def _contribute(self, gradient: _Gradient) -> None:
        """Copy the parameter's gradient, scaled, to where it is sent from."""
        gradient.arrived = True
        kept = self._contribution.kept
        given = gradient.parameter.grad if kept is None else kept.get(gradient.parameter)
        if given is None:
            gradient.outgoing.zero_()
            return
        gradient.place.present[gradient.position] = 1
        with torch.no_grad():
            if gradient.place.casts:
                gradient.outgoing.copy_(given).mul_(self._factor)
            else:
                torch.mul(given, self._factor, out=gradient.outgoing)

    def _end_backward(self) -> None:
        self._backward = None
        self._finish_round()

    def _finish_round(self) -> None:
        """Send what has not been sent yet, wait for everything, and bind what came back."""
        self.exchanged_in_step += 1
        for place in self._places:
            if not self._open.started(place.segment):
                self._contribute_late(place)
                self._send(place)
                if not self._early:
                    # One after the other is faster than all at once, which thrash the caches. With overlap
                    # backward ranks may have begun different segments, and waiting here could be for ever.
                    self._open.wait(place.segment)
        for place in self._places:
            self._open.finish(place.segment)
            self._bind(place)
        companions = (place.segment.incoming_companions for place in self._places)
        self.nonfinite_anywhere = any(values[NONFINITE] != 0 for values in companions)
        self._open.end_round()

    def _contribute_late(self, place: _Place) -> None:
        """Fill in parameters that this backward did not reach: from an earlier one, or with nothing."""
        for gradient in place.gradients:
            if not gradient.arrived:
                self._contribute(gradient)

    def _send(self, place: _Place) -> None:
        segment = place.segment
        companions = segment.outgoing_companions
        bad = self._nonfinite_in(place)
        self.nonfinite += bad
        companions[WEIGHT] = self._contribution.weight * self._open.scale
        companions[NONFINITE] = float(bool(bad))
        np.multiply(place.present, self._open.scale, out=companions[FIRST_PRESENCE:])
        self._open.start(segment)

    def _nonfinite_in(self, place: _Place) -> list[str]:
        # One pass, which a single NaN or Inf poisons; only then each parameter on its own.
        data = place.segment.outgoing[: place.segment.numel]
        if bool(torch.isfinite(data.sum())):
            return []
        return [g.name for g in place.gradients if not bool(torch.isfinite(g.outgoing).all())]

    def _bind(self, place: _Place) -> None:
        segment = place.segment
        companions = segment.incoming_companions
        weight = float(companions[WEIGHT])
        data = segment.incoming[: segment.numel]
        if abs(weight - 1) > _WEIGHT_TOLERANCE and weight != 0:
            data.mul_(1 / weight)
        if place.casts:
            place.results.copy_(data)
        for gradient in place.gradients:
            present = companions[FIRST_PRESENCE + gradient.position] != 0
            gradient.parameter.grad = gradient.result if present else None

    def take_part(self) -> None:
        """Take part in a step's exchange without a gradient of one's own, and bind the others' mean."""
        self._begin_round(NOTHING)
        self._finish_round()

    def close(self) -> None:
        """Take the hooks off; gradients become tensors of their own."""
        for handle in self._handles:
            handle.remove()
        for place in self._places:
            for gradient in place.gradients:
                if gradient.parameter.grad is gradient.result:
                    gradient.parameter.grad = gradient.result.clone()


def _hook_for(gradient: _Gradient, arrived: Callable[[_Gradient], None]) -> Callable[[Tensor], None]:
    # A function, not a method: `copy.deepcopy` of a model copies hooks, and must not copy the session with them.
    def hook(parameter: Tensor) -> None:
        if parameter is gradient.parameter:
            arrived(gradient)

    return hook
