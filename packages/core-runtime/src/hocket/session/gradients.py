"""The gradients' moment: from autograd's hooks to `p.grad` holding what the strategy makes of all ranks' gradients.

When a parameter's gradient is in, its hook copies it, scaled, into the segment that will be sent and lets go of it;
when `backward()` ends, `p.grad` is bound to a view of what came back. With overlap backward a segment is sent as
soon as its last gradient is in; with overlap none all are sent when backward has ended. The slot's exchanges follow
each other segment by segment: what one gives is what the next one sends, between the same two buffers.

Behind a segment's data travel a few companions through the same linear combinations: the rank's weight, whether it
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
from hocket.segment.segment import Segment, view_of
from hocket.session.autograd import at_end_of_backward, current_backward, is_nested_backward
from hocket.session.exchanging import OpenExchange
from hocket.session.layout import FIRST_PRESENCE, NONFINITE, WEIGHT
from hocket.session.takeover import Takeover
from hocket.session.weights import NOTHING, AgreedWeights, Contribution
from hocket.strategy.exchange import Overlap
from hocket.transport.peer import Array

__all__ = ["GradientMoment", "Stage"]

# A mean of weights that is this close to 1 is 1: a third, three times, is not.
_WEIGHT_TOLERANCE = 1e-6

# From so many elements on, a copy around the caches that looks for NaN and Inf on its way is faster than torch's.
_SMALLEST_STREAM = 1 << 16

#: An exchange of the slot, and a segment as it exchanges it.
Stage = tuple[OpenExchange, Segment]


class _Gradient:
    """One parameter's places: where its gradient is sent from, and what `p.grad` is bound to."""

    __slots__ = (
        "arrived",
        "finite",
        "name",
        "outgoing",
        "parameter",
        "place",
        "position",
        "result",
        "stream",
    )

    def __init__(self, parameter: nn.Parameter, place: _Place, position: int) -> None:
        span = place.first.spans[position]
        self.name = span.name
        self.parameter = parameter
        self.place = place
        self.position = position
        self.outgoing = view_of(place.first.outgoing, span)
        self.result = view_of(place.results, span)
        self.arrived = False
        # Whether what is sent holds neither NaN nor Inf; None before anybody has looked.
        self.finite: bool | None = None
        # `outgoing` as NumPy knows it, where a large gradient is best copied around the caches.
        self.stream: Array | None = None
        on_cpu = self.outgoing.device.type == "cpu"
        if on_cpu and not place.casts and span.numel >= _SMALLEST_STREAM and self.outgoing.is_contiguous():
            self.stream = self.outgoing.view(-1).numpy()


class _Place:
    """A segment on its way through the slot's exchanges, within one backward.

    Attributes:
        stages: the exchanges that this rank takes it through, in order.
        first, last: the segment as the first of them sends it, and as the last one gives it.
        in_place: whether what comes back takes the place of what was sent.
        at: how many of them are over; -1 before the first has begun.
    """

    def __init__(self, stages: Sequence[Stage], parameters: dict[str, nn.Parameter]) -> None:
        self.stages = stages
        self.first, self.last = stages[0][1], stages[-1][1]
        self.in_place = self.last.incoming is self.first.outgoing
        self.at = -1
        self.missing = 0
        # 1 for each parameter that has a gradient in this round, else 0.
        self.present = np.zeros(len(self.first.spans), dtype=self.first.outgoing_array.dtype)
        dtype = self.first.spans[0].dtype
        # float16 and bfloat16 gradients are summed in float32, and handed to the optimizer in their own dtype.
        self.casts = self.last.incoming.dtype != dtype
        data = self.last.incoming[: self.last.numel]
        self.results = torch.empty_like(data, dtype=dtype) if self.casts else data
        self.gradients = [
            _Gradient(parameters[span.name], self, position) for position, span in enumerate(self.first.spans)
        ]

    def begin(self) -> None:
        """Send the segment through its first exchange."""
        self.at = 0
        opened, segment = self.stages[0]
        opened.start(segment)

    def advance(self) -> None:
        """Go on to the next exchange if the one under way is done and not the last; never blocks."""
        if 0 <= self.at < len(self.stages) - 1:
            opened, segment = self.stages[self.at]
            if opened.arrived(segment):
                self.pass_on()

    def pass_on(self) -> None:
        """Finish the exchange under way, and begin the next if there is one."""
        opened, segment = self.stages[self.at]
        opened.finish(segment)
        self.at += 1
        if self.at < len(self.stages):
            given, (opened, segment) = segment, self.stages[self.at]
            # The data lies there already: what one exchange gives is what the next one sends.
            np.multiply(given.incoming_companions, opened.scale, out=segment.outgoing_companions)
            if opened.scale != 1.0:
                segment.outgoing[: segment.numel].mul_(opened.scale)
            opened.start(segment)

    def finish(self) -> None:
        """Wait until the last exchange is over."""
        while self.at < len(self.stages):
            self.pass_on()


class GradientMoment:
    """Hooks, sends and binds the gradients of one model.

    Args:
        parameters: the trainable ones by name.
        opened: the slot's exchanges that this rank takes part in, over more than one rank, in order; the first has
            all of the model's segments.
        segments: each segment's way through them.
        contribution: what this rank puts into the step's mean; asked for once per backward.
        check: raises where the parameters are no longer what they were; called once per backward.
        takeover: what the first exchange's compressor takes over from the optimizer.
        agreed_weights: where residuals are kept, for which weights have to be known before anything is sent.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        opened: Sequence[OpenExchange],
        segments: Sequence[Sequence[Stage]],
        contribution: Callable[[], Contribution],
        check: Callable[[], None],
        takeover: Takeover | None,
        agreed_weights: AgreedWeights | None,
    ) -> None:
        self._exchanges = opened
        self._open = opened[0]
        self._contribution_of_step = contribution
        self._contribution = NOTHING
        self._check = check
        self.takeover = takeover
        self._agreed_weights = agreed_weights
        self._early = self._open.exchange.overlap is Overlap.BACKWARD
        self._places = [_Place(stages, parameters) for stages in segments]
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
            for gradient in place.gradients:
                hook = _hook_for(gradient, self._arrived)
                self._handles.append(gradient.parameter.register_post_accumulate_grad_hook(hook))

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
        if len(self._exchanges) > 1:
            for each in self._places:
                each.advance()

    def _begin_backward(self) -> None:
        if is_nested_backward():
            raise AttachError(
                "a backward was called inside another one (checkpoint with use_reentrant=True?): nobody can tell "
                "when gradients are complete. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), "
                "which gives the same gradients"
            )
        if not all(opened.idle for opened in self._exchanges):
            raise HocketError(
                "the last backward() failed after it had begun to send gradients: this rank cannot go on training "
                "with the others"
            )
        self._check()
        self._backward = current_backward()
        self._begin_round(self._contribution_of_step())
        at_end_of_backward(self._end_backward)

    def _begin_round(self, contribution: Contribution) -> None:
        if self._agreed_weights is not None:
            contribution = self._agreed_weights.agree(contribution)
        self._contribution = contribution
        self._factor = contribution.factor * self._open.scale
        self.nonfinite = []
        if self.takeover is not None:
            self.takeover.read()
        for place in self._places:
            place.at = -1
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
            gradient.finite = True
            return
        gradient.place.present[gradient.position] = 1
        gradient.finite = None
        with torch.no_grad():
            if gradient.stream is not None and _streams(given, gradient.outgoing):
                from hocket.kernels import scaled_copy

                gradient.finite = scaled_copy(given.view(-1).numpy(), self._factor, gradient.stream)
            elif gradient.place.casts:
                gradient.outgoing.copy_(given).mul_(self._factor)
            else:
                torch.mul(given, self._factor, out=gradient.outgoing)

    def _end_backward(self) -> None:
        self._backward = None
        self._finish_round()

    def _finish_round(self) -> None:
        """Send what has not been sent yet, wait for everything, and bind what came back."""
        self.exchanged_in_step += 1
        waiting = [place for place in self._places if place.at < 0]
        for place in waiting:
            self._contribute_late(place)
        packing = self._open.channel.packing
        if packing is not None and packing.compressor.prepares:
            packing.compressor.prepare(
                self._open.segments, self._open.round, self._open.peer.size, self._factor
            )
        for place in waiting:
            self._send(place)
            if not (self._early or place.in_place):
                # Messages are faster one after the other than all at once, which thrash the caches. With overlap
                # backward ranks may have begun different segments, and waiting here could be for ever.
                place.finish()
        if len(self._exchanges) > 1:
            # All go on to their next exchange before the last of one is waited for.
            for stage in range(len(self._exchanges) - 1):
                for place in self._places:
                    if place.at == stage < len(place.stages) - 1:
                        place.pass_on()
        for place in self._places:
            place.finish()
            self._bind(place)
        companions = (place.last.incoming_companions for place in self._places)
        self.nonfinite_anywhere = any(values[NONFINITE] != 0 for values in companions)
        for opened in self._exchanges:
            opened.end_round()

    def _contribute_late(self, place: _Place) -> None:
        """Fill in parameters that this backward did not reach: from an earlier one, or with nothing."""
        for gradient in place.gradients:
            if not gradient.arrived:
                self._contribute(gradient)

    def _send(self, place: _Place) -> None:
        segment = place.first
        companions = segment.outgoing_companions
        bad = self._nonfinite_in(place)
        self.nonfinite += bad
        segment.finite = not bad
        companions[WEIGHT] = self._contribution.weight * self._open.scale
        companions[NONFINITE] = float(bool(bad))
        np.multiply(place.present, self._open.scale, out=companions[FIRST_PRESENCE:])
        if self.takeover is not None:
            self.takeover.give(segment, [bool(has) for has in place.present], self._factor)
        place.begin()

    def _nonfinite_in(self, place: _Place) -> list[str]:
        """Return the names of the parameters whose gradients hold NaN or Inf."""
        unknown = [gradient for gradient in place.gradients if gradient.finite is None]
        # One pass, which a single NaN or Inf poisons; only then each parameter on its own.
        if len(unknown) == len(place.gradients):
            total = place.first.outgoing[: place.first.numel].sum()
        else:
            total = sum((gradient.outgoing.sum() for gradient in unknown), torch.zeros(()))
        if not bool(torch.isfinite(total)):
            for gradient in unknown:
                gradient.finite = bool(torch.isfinite(gradient.outgoing).all())
        return [gradient.name for gradient in place.gradients if gradient.finite is False]

    def _bind(self, place: _Place) -> None:
        segment = place.last
        companions = segment.incoming_companions
        weight = float(companions[WEIGHT])
        data = segment.incoming[: segment.numel]
        if abs(weight - 1) > _WEIGHT_TOLERANCE and weight != 0:
            data.mul_(1 / weight)
        if place.casts:
            place.results.copy_(data)
        for gradient in place.gradients:
            present = companions[FIRST_PRESENCE + gradient.position] != 0
            # What a residual held back may come when nobody has a gradient any more.
            late = not present and bool(gradient.result.any())
            gradient.parameter.grad = gradient.result if present or late else None

    def take_part(self) -> None:
        """Take part in a step's exchange without a gradient of one's own, and bind the others' mean."""
        self._begin_round(NOTHING)
        self._finish_round()

    def close_lane(self) -> None:
        """Give back what the ranks agree over; collective."""
        if self._agreed_weights is not None:
            self._agreed_weights.close()

    def close(self) -> None:
        """Take the hooks off; gradients become tensors of their own."""
        for handle in self._handles:
            handle.remove()
        for place in self._places:
            for gradient in place.gradients:
                if gradient.parameter.grad is gradient.result:
                    gradient.parameter.grad = gradient.result.clone()


def _streams(given: Tensor, outgoing: Tensor) -> bool:
    """Return whether a gradient can be copied as flat memory to where it is sent from."""
    return given.is_contiguous() and given.dtype == outgoing.dtype and given.data_ptr() != outgoing.data_ptr()


def _hook_for(gradient: _Gradient, arrived: Callable[[_Gradient], None]) -> Callable[[Tensor], None]:
    # A function, not a method: `copy.deepcopy` of a model copies hooks, and must not copy the session with them.
    def hook(parameter: Tensor) -> None:
        if parameter is gradient.parameter:
            arrived(gradient)

    return hook
