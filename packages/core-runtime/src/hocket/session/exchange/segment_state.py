"""Segments of gradients on their way through the slot's exchanges, and the places of their parameters' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount

import numpy as np
import torch
from torch import Tensor, nn

from hocket.arrays import Array
from hocket.plan.layout import FIRST_PRESENCE, WEIGHT
from hocket.segment.partition import ParameterSpan
from hocket.segment.segment import Segment, view_of
from hocket.session.exchange.active import ActiveExchange
from hocket.session.step.dropped import DroppedSums
from hocket.strategy.exchange import Exchange

#: A mean of weights that is this close to 1 is 1: a third, three times, is not.
WEIGHT_TOLERANCE = 1e-6

# From so many elements on, a copy around the caches that looks for NaN and Inf on its way is faster than torch's.
_SMALLEST_STREAM = 1 << 16

# Of a result that nobody else refers to: the slot's, the segment's, and the argument of who asks.
_RESULT_REFERENCES = 3

#: An exchange of the slot, and a segment as it exchanges it.
Stage = tuple[ActiveExchange, Segment]


class GradientSlot:
    """The places of one parameter: its gradient in the outgoing segment, and the tensor of `p.grad`."""

    __slots__ = (
        "__weakref__",
        "arrived",
        "base",
        "brought",
        "came",
        "finite",
        "name",
        "outgoing",
        "parameter",
        "position",
        "result",
        "state",
        "stream",
        "sums",
        "total",
        "version",
    )

    def __init__(self, parameter: nn.Parameter, state: SegmentState, position: int) -> None:
        span = state.first.spans[position]
        self.name = span.name
        self.parameter = parameter
        self.state = state
        self.position = position
        self.outgoing = view_of(state.first.outgoing, span)
        self.result = _gradient_in(state.results, span)
        # Of `p.grad`, when it was bound.
        self.version = 0
        self.arrived = False
        # What earlier rounds of the step have brought, to which this one's result is added (see `account`).
        self.base: Tensor | None = None
        # What several rounds of a step have brought together, where that is what `p.grad` was bound to.
        self.total: Tensor | None = None
        # Whether the rounds of the step have brought something.
        self.came = False
        # Whether some of it is not zero, as a tensor that nobody has waited for; None where nobody has looked.
        self.brought: Tensor | None = None
        # Of results that are sums of what came in time.
        self.sums = None if state.divides else DroppedSums()
        # Whether what is sent holds neither NaN nor Inf; None before anybody has looked.
        self.finite: bool | None = None
        # `outgoing` as NumPy knows it, where a large gradient is best copied around the caches.
        self.stream: Array | None = None
        on_cpu = self.outgoing.device.type == "cpu"
        if on_cpu and not state.casts and span.numel >= _SMALLEST_STREAM and self.outgoing.is_contiguous():
            self.stream = self.outgoing.view(-1).numpy()

    def take(self, given: Tensor | None) -> None:
        """Copy a gradient, times the round's scale, into the outgoing segment; zeros for none."""
        self._copy(given)
        if self.sums is not None:
            self.sums.take_owed(self.outgoing)

    def _copy(self, given: Tensor | None) -> None:
        self.arrived = True
        if given is None:
            self.outgoing.zero_()
            self.finite = True
            return
        if given.layout != torch.strided:  # of F.embedding(..., sparse=True)
            given = given.to_dense()
        self.state.present[self.position] = 1
        self.finite = None
        if self.stream is not None and _lies_alike(given, self.outgoing):
            from hocket.kernels import scaled_copy

            self.finite = scaled_copy(given.view(-1).numpy(), float(self.state.scale), self.stream)
        elif self.state.casts:
            self.outgoing.copy_(given).mul_(self.state.scale)
        else:
            torch.mul(given, self.state.scale, out=self.outgoing)

    @property
    def holds_result(self) -> bool:
        """Tell whether `p.grad` is the tensor that it was bound to last."""
        gradient = self.parameter.grad
        return gradient is not None and (gradient is self.result or gradient is self.total)

    @property
    def was_changed(self) -> bool:
        """Tell whether a program has written into `p.grad` since `note_version`."""
        gradient = self.parameter.grad
        return gradient is not None and gradient._version != self.version

    @property
    def was_replaced(self) -> bool:
        """Tell whether a program has put another tensor into `p.grad` than it was bound to last."""
        gradient = self.parameter.grad
        return gradient is not None and gradient is not self.result and gradient is not self.total

    def note_version(self) -> Tensor | None:
        """Note the version of `p.grad`, to detect writes into it; return that."""
        gradient = self.parameter.grad
        if gradient is not None:
            self.version = gradient._version
        return gradient

    def came_so_far(self) -> Tensor | None:
        """Return what the step's rounds have brought; None where a program has changed it."""
        if self.base is not None:
            return self.base
        if self.sums is not None and self.sums.copy is not None:
            return self.sums.copy
        bound = self.total if self.total is not None else self.result
        return bound if bound._version == self.version else None

    def part_with_result(self) -> Tensor:
        """Give the last result memory of its own, which the next one leaves alone; return it."""
        given = self.result
        given.data = given.detach().clone(memory_format=torch.preserve_format)
        self.let_go()
        return given

    def let_go(self) -> None:
        """Leave the last result's tensor to its holders, and receive the next result in another."""
        self.result = _gradient_in(self.state.results, self.state.first.spans[self.position])
        self.state.hold(self)

    def bind(self, *, came: bool) -> None:
        """Bind `p.grad` to the result plus that of the step's earlier rounds; None if there is neither."""
        result = self.result if came else None
        self.total = None
        if self.base is not None:
            result, self.base = self.base if result is None else self.base.add_(result), None
            self.total = result
        if self.sums is not None and result is not None and (carried := self.sums.take_carried()) is not None:
            result = self.total = carried.mul_(self.state.factor).add_(result)
        self.came = result is not None
        self.parameter.grad = result


class SegmentState:
    """A segment on its way through the slot's exchanges, within one backward.

    Attributes:
        stages: the exchanges that this rank takes it through, in order.
        first, last: the segment of the first exchange, which sends it, and of the last, which returns it.
        in_place: whether results overwrite the outgoing data.
        present: 1 for each parameter that has a gradient in this round on this rank, else 0.
        anywhere: the same of all ranks, where they have agreed on it.
        at: number of stages that are over; -1 before the first has begun.
    """

    def __init__(
        self, stages: Sequence[Stage], parameters: dict[str, nn.Parameter], exchanges: Sequence[Exchange]
    ) -> None:
        """Make the state of one segment.

        Args:
            stages: the attribute.
            parameters: the trainable ones by name.
            exchanges: the slot's on all ranks. The result means the same on a rank that takes part in few of them.
        """
        self.stages = stages
        self.first, self.last = stages[0][1], stages[-1][1]
        self.in_place = self.last.incoming is self.first.outgoing
        #: Whether what comes back is divided by the weight that comes with it.
        self.divides = all(exchange.collective.traits.divides_by_weight for exchange in exchanges)
        self.at = -1
        #: What results were multiplied by, when they were bound.
        self.factor = 1.0
        # By which a round's gradients are multiplied; on the host a tensor, as torch takes 2 us longer with a number.
        self.scale: Tensor | float = 1.0
        self.missing = 0
        self.present = np.zeros(len(self.first.spans), dtype=self.first.outgoing_trailer.dtype)
        self.anywhere = np.zeros_like(self.present)
        dtype = self.first.spans[0].dtype
        # float16 and bfloat16 gradients are summed in float32, and handed to the optimizer in their own dtype.
        self.casts = self.last.incoming.dtype != dtype
        data = self.last.incoming[: self.last.numel]
        self.results = torch.empty_like(data, dtype=dtype) if self.casts else data
        self.gradients = [
            GradientSlot(parameters[span.name], self, position)
            for position, span in enumerate(self.first.spans)
        ]
        self._held = [gradient.result for gradient in self.gradients]
        self._addresses = list(map(Tensor.data_ptr, self._held))

    @property
    def adds_up(self) -> bool:
        """Tell whether the result is added to that of the step's earlier rounds."""
        return any(gradient.base is not None for gradient in self.gradients)

    def hold(self, gradient: GradientSlot) -> None:
        """Note another tensor that a gradient's result is received in."""
        self._held[gradient.position] = gradient.result

    def reset(self, scale: float) -> None:
        """Prepare for the gradients of another backward, which are multiplied by `scale`."""
        outgoing = self.first.outgoing
        self.scale = torch.full((), scale, dtype=outgoing.dtype) if outgoing.is_cpu else scale
        self.at = -1
        self.missing = len(self.gradients)
        self.present[:] = 0
        self.anywhere[:] = 0
        self.first.finite = None
        if list(map(Tensor.data_ptr, self._held)) != self._addresses:
            self._let_go_of_moved()
        for gradient in self.gradients:
            gradient.arrived = False
            # A gradient that the user keeps stays as it is; one that is still `p.grad` is added to, as in torch.
            if (
                getrefcount(gradient.result) > _RESULT_REFERENCES
                and gradient.parameter.grad is not gradient.result
            ):
                gradient.part_with_result()

    def _let_go_of_moved(self) -> None:
        """Let go of gradients with replaced memory (`p.grad.data = ...`, `model.to()`), which results do not reach."""
        for gradient, address in zip(self.gradients, self._addresses, strict=True):
            if gradient.result.data_ptr() != address:
                gradient.let_go()

    def begin(self) -> None:
        """Send the segment through its first exchange."""
        self.at = 0
        opened, segment = self.stages[0]
        opened.start(segment)

    def advance(self) -> None:
        """Start the next exchange if the one under way is done and not the last; never blocks."""
        if 0 <= self.at < len(self.stages) - 1:
            opened, segment = self.stages[self.at]
            if opened.arrived(segment):
                self.pass_on()

    def is_before(self, opened: ActiveExchange) -> bool:
        """Return whether `opened` is the exchange after the one that is under way."""
        return 0 <= self.at < len(self.stages) - 1 and self.stages[self.at + 1][0] is opened

    def pass_on(self) -> None:
        """Finish the exchange under way, and begin the next if there is one."""
        opened, segment = self.stages[self.at]
        opened.finish(segment)
        self.at += 1
        if self.at < len(self.stages):
            given, (opened, segment) = segment, self.stages[self.at]
            # The data lies there already: what one exchange gives is what the next one sends.
            np.multiply(given.incoming_trailer, opened.scale, out=segment.outgoing_trailer)
            if opened.scale != 1.0:
                segment.outgoing[: segment.numel].mul_(opened.scale)
            opened.start(segment)

    def finish(self) -> None:
        """Wait until the last exchange is over."""
        while self.at < len(self.stages):
            self.pass_on()

    def flag_nonfinite(self) -> None:
        """Make the device flag NaN or Inf of the outgoing data in the trailer."""
        segment = self.first
        assert segment.flag is not None
        total = segment.outgoing[: segment.numel].sum(dtype=torch.float64)  # large numbers are no Inf there
        segment.outgoing[segment.flag].copy_(torch.isfinite(total).logical_not())

    def flagged(self) -> list[str]:
        """Return the names of parameters whose gradients the device has flagged for NaN or Inf."""
        first = self.first
        if first.sent_is_finite():
            return []
        return [s.name for s in first.spans if not first.sent_is_finite(s.start, s.start + s.numel)]

    def nonfinite(self) -> list[str]:
        """Return the names of parameters whose outgoing gradients hold NaN or Inf."""
        unknown = [gradient for gradient in self.gradients if gradient.finite is None]
        # One pass, which a single NaN or Inf poisons; only then each parameter on its own.
        if len(unknown) == len(self.gradients):
            total = self.first.outgoing[: self.first.numel].sum()
        else:
            total = sum((gradient.outgoing.sum() for gradient in unknown), torch.zeros(()))
        if not bool(torch.isfinite(total)):
            for gradient in unknown:
                gradient.finite = bool(torch.isfinite(gradient.outgoing).all())
        return [gradient.name for gradient in self.gradients if gradient.finite is False]

    def bind(self, factor: float = 1.0) -> None:
        """Bind each `p.grad` to `factor` times the result, or None where no rank had a gradient.

        In a step without a result, as its rounds arrived with an earlier one (a rank that has caught up with a partial
        collective), parameters with a gradient on this rank get zeros: momentum and weight decay go on.
        """
        self.factor = factor
        trailer = self.last.incoming_trailer
        weight = float(trailer[WEIGHT])
        nothing_came = not self.divides and weight == 0
        data = self.last.incoming[: self.last.numel]
        if self.divides and abs(weight - 1) > WEIGHT_TOLERANCE and weight != 0:
            factor /= weight
        if factor != 1:
            data.mul_(factor)
        if self.casts:
            self.results.copy_(data)
        for gradient in self.gradients:
            present = trailer[FIRST_PRESENCE + gradient.position] != 0 or (
                nothing_came and self.present[gradient.position] != 0
            )
            # A contribution that was late for its round may arrive when no rank has a gradient any more. It stays with
            # what was dropped, of which it may be the counterpart.
            sums = gradient.sums
            late = sums is not None and not present and self._came_late(gradient)
            if late and sums is not None and sums.add_late(gradient.result, self.factor):
                late = False
            gradient.bind(came=present or late)

    def place_of(self, gradient: GradientSlot) -> slice:
        """Return the place of a parameter in the outgoing segment."""
        span = self.first.spans[gradient.position]
        return slice(span.start, span.stop)

    def _came_late(self, gradient: GradientSlot) -> bool:
        if self.last.staged and self.stages[-1][0].channel.packing is None:
            span = self.last.spans[gradient.position]  # the same is in host memory, where nobody waits for it
            return bool(self.last.incoming_array[span.start : span.start + span.numel].any())
        return bool(gradient.result.any())

    def spoil(self) -> None:
        """Bind NaN in place of a round's result, for scalers and other checks."""
        self.at = len(self.stages)
        for gradient in self.gradients:
            gradient.result.fill_(
                torch.nan
            )  # not what lies between them, which is sent where results overwrite it
            gradient.base, gradient.came = None, True
            gradient.parameter.grad = gradient.result

    def unbind(self) -> None:
        """Make `p.grad` of each parameter a tensor of its own."""
        for gradient in self.gradients:
            if gradient.parameter.grad is gradient.result:
                gradient.parameter.grad = gradient.result.clone()


def _gradient_in(results: Tensor, span: ParameterSpan) -> Tensor:
    """Return a parameter's place in the results, as a tensor that is no view for autograd (`detach_`)."""
    return view_of(results, span).data


def _lies_alike(given: Tensor, outgoing: Tensor) -> bool:
    """Return whether a gradient can be copied into the outgoing segment as flat memory."""
    return given.is_contiguous() and given.dtype == outgoing.dtype and given.data_ptr() != outgoing.data_ptr()
