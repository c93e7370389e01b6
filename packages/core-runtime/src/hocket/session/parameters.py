"""Exchanges parameters after the optimizer's step, in one of three overlaps.

- Overlap none: sent and merged before `optimizer.step()` returns.
- Overlap forward: sent when the next forward begins, in the order of the segments (see `send_window`), and merged
  segment by segment before that first reads them (see `forward`), or before another step of the optimizer. What is
  written into parameters after a step (pruning masks, clipped weights) is a part of what is sent. Ranks that share
  memory merge it where it is, all segments at once. Where nothing is written, bit for bit the numbers of overlap none.
- Overlap delayed: sent after a step, and merged after the next one's optimizer step as
  x += combination - what was sent, which keeps the replicas' mean. Staleness 1 (Assran et al. 2019, Overlap-SGP).

Where a push-sum weight w travels with a segment, the model computes with x / w and the optimizer steps x: the
parameters are multiplied by w before its step and divided by it afterwards (Assran et al. 2019, algorithm 1). Of
float16 and bfloat16 parameters x is kept in float32, and what the optimizer changes is added to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.errors import NonFiniteError, some
from hocket.plan.layout import WEIGHT
from hocket.segment.segment import Segment, view_of
from hocket.session.exchange import ActiveExchange
from hocket.strategy.exchange import Overlap

__all__ = ["ParameterMix", "ParameterSync", "PushSums"]

#: An exchange's push-sum weights, and the values for which parameters are too short, by the segment's index.
PushSums = tuple[dict[int, float], dict[int, Tensor]]


# From so many elements on, one compiled pass is faster than torch's five.
_SMALLEST_FUSED = 1 << 16


class Unrounded:
    """The value x of a segment, of which its parameters hold x, or x / w, as well as they can.

    Rounded to the parameter's own dtype in every round, as x, as x / w and as x again, it would drift away.

    Args:
        parameters: flat, of a shorter dtype.
        dtype: of x.

    Attributes:
        value: x, flat.
    """

    def __init__(self, parameters: Tensor, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self.value = parameters.to(dtype)

    def bias(self, weight: float) -> None:
        """Make parameters, which hold x / w, hold x; what others have written into them since is taken as it is."""
        written = self._parameters != (self.value / weight).to(self._parameters.dtype)
        self.value = torch.where(written, self._parameters.to(self.value.dtype) * weight, self.value)
        self.show()

    def step(self) -> Tensor:
        """Add to x what the optimizer has added to the parameters, which hold x, and return it."""
        self.value += self._parameters.to(self.value.dtype) - self.value.to(self._parameters.dtype)
        return self.value

    def debias(self, weight: float) -> None:
        """Make parameters, which hold x, hold x / w."""
        self.step()
        self._parameters.copy_(self.value / weight)

    def show(self) -> None:
        """Make parameters hold x."""
        self._parameters.copy_(self.value)


class ParameterMix:
    """One exchange of the slot, with what of it is under way.

    Args:
        opened: over more than one rank.
        targets: the flat part of the parameter storage of each of its segments.
        take_values: takes over what parameters were set to (`p.data = ...`) since the step's end.
    """

    def __init__(
        self, opened: ActiveExchange, targets: Sequence[Tensor], take_values: Callable[[], None]
    ) -> None:
        self.opened = opened
        self.overlap = opened.exchange.overlap
        self._places = {s.index: (s, target) for s, target in zip(opened.segments, targets, strict=True)}
        # The segments that are sent from where the parameters are, and whose combination lands there.
        places = self._places.items()
        self._sent = {i for i, (s, target) in places if s.outgoing.data_ptr() == target.data_ptr()}
        self._landing = {i for i, (s, target) in places if s.incoming.data_ptr() == target.data_ptr()}
        self._take_values = take_values
        # The number of the step that the exchange follows.
        self._step = 0
        #: Whether it waits for the next forward.
        self.due = False
        #: The push-sum weight of each segment, by its index; empty where none travels.
        self.weights: dict[int, float] = {}
        if opened.exchange.carries_weight:
            self.weights = dict.fromkeys(self._places, 1.0)
        #: What x is, by the segment's index, where parameters are too short for it.
        self.unrounded = {
            i: Unrounded(target, segment.outgoing.dtype)
            for i, (segment, target) in places
            if i in self.weights and segment.outgoing.dtype != target.dtype
        }
        # The segments whose parameters hold x, and not x / w.
        self._biased: set[int] = set()
        # The segments whose `outgoing` holds what is sent next, and whether that is finite.
        self._copied: dict[int, bool] = {}

    def bias(self) -> None:
        """Make parameters hold x, what the optimizer steps, in place of x / w, what the model computes with."""
        for index in self.weights.keys() - self._biased:
            self._biased.add(index)
            if index in self.unrounded:
                self.unrounded[index].bias(self.weights[index])
            elif self.weights[index] != 1.0:
                self._places[index][1].mul_(self.weights[index])

    def debias(self) -> None:
        """Make parameters hold x / w, what the model computes with, where what is under way does not overwrite them."""
        for index in sorted(self._biased):
            if self.overlap is Overlap.DELAYED or not self.opened.started(self._places[index][0]):
                self._debias(index)

    def set_weights(self, weights: dict[int, float], values: Mapping[int, Tensor] | None = None) -> None:
        """Give segments, of which none is under way, other weights, and take parameters for what they divide to.

        Args:
            weights: by the segment's index.
            values: what `values` returned, where parameters are too short for them.
        """
        self.weights = weights
        self._biased = set()
        for index, value in (values or {}).items():
            self.unrounded[index].value.copy_(value)

    def values(self) -> dict[int, Tensor]:
        """Return copies of what parameters are too short for, by the segment's index."""
        return {index: unrounded.value.clone() for index, unrounded in self.unrounded.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return each parameter's push-sum weight, and the values for which parameters are too short."""
        places = [(weight, self._places[index][0]) for index, weight in self.weights.items()]
        return {
            "weights": {span.name: weight for weight, segment in places for span in segment.spans},
            "values": self._values_by_name(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take parameters for what the push-sums that `state_dict` returned are divided to."""
        firsts = {index: self._places[index][0].spans[0].name for index in self.weights}
        self.set_weights({index: state["weights"][name] for index, name in firsts.items()})
        for name, value in self._values_by_name().items():
            value.copy_(state["values"][name])

    def _values_by_name(self) -> dict[str, Tensor]:
        return {
            span.name: view_of(unrounded.value, span)
            for index, unrounded in self.unrounded.items()
            for span in self._places[index][0].spans
        }

    def _debias(self, index: int) -> None:
        self._biased.discard(index)
        if index in self.unrounded:
            self.unrounded[index].debias(self.weights[index])
        elif self.weights[index] != 1.0:
            self._places[index][1].div_(self.weights[index])

    def start(self, step: int) -> None:
        """Send all segments; with overlap forward when the next forward begins, or `merge_all` is called.

        Raises:
            NonFiniteError: a parameter that was about to be sent is NaN or Inf.
        """
        self._step = step
        self.due = True
        if self.overlap is not Overlap.FORWARD:
            self.begin()

    def begin(self) -> None:
        """Send all segments, if that is still to be done."""
        if not self.due:
            return
        if self.overlap is Overlap.FORWARD:  # long after the step, at whose end they were taken over
            self._take_values()
        self.due = False
        self.bias()
        for index, (segment, target) in self._places.items():
            finite = self._copied.pop(index, None)
            if not (finite or self.opened.channel.finds_nonfinite(segment)):
                self._refuse_nonfinite(segment, target)
            if index in self.unrounded:
                segment.outgoing[: segment.numel].copy_(self.unrounded[index].step())
            elif finite is None and index not in self._sent:
                segment.outgoing[: segment.numel].copy_(target)
            if self.weights:
                segment.outgoing_trailer[WEIGHT] = self.weights[index]
            if self.overlap is Overlap.FORWARD:
                self.opened.start_in_window(segment)
            elif self.overlap is Overlap.DELAYED:
                self.opened.start(segment)
        if self.overlap is Overlap.NONE:
            self.opened.start_all()

    def merge(self, index: int, *, sends: bool = False) -> None:
        """Finish segment number `index`, if it is under way, and write what came of it into the parameters.

        Args:
            sends: whether they are sent at once, so that one pass can merge and copy.
        """
        if index not in self._places or not self.opened.started(self._places[index][0]):
            return
        segment, target = self._places[index]
        outcome = self.opened.finish(segment)
        if outcome.nonfinite:
            self._raise_nonfinite(segment, target, outcome.nonfinite)
        if self.weights:
            # With overlap delayed nothing has changed the weight since it was sent.
            self.weights[index] = float(segment.incoming_trailer[WEIGHT])
        if index in self.unrounded:
            self._take(segment, self.unrounded[index].step())
            self.unrounded[index].show()
        elif self.overlap is Overlap.DELAYED and _fuses(segment, target):
            self._take_in_one_pass(segment, target, sends=sends)
        else:
            self._take(segment, target)
        if index in self._biased and self.overlap is Overlap.FORWARD:
            self._debias(index)
        if self.opened.idle:
            self.opened.end_round()

    def _take(self, segment: Segment, target: Tensor) -> None:
        scale = self.opened.scale
        if segment.index in self._landing:
            if scale != 1.0:
                target.mul_(scale)
            return
        combined = segment.incoming[: segment.numel]
        if self.overlap is Overlap.DELAYED:
            # What the parameters did since they were sent stays.
            target.add_(combined.mul_(scale).sub_(segment.outgoing[: segment.numel]))
        elif combined.dtype == target.dtype:
            torch.mul(combined, scale, out=target)
        else:
            target.copy_(combined.mul_(scale))

    def _take_in_one_pass(self, segment: Segment, target: Tensor, *, sends: bool) -> None:
        """Do what `_take` does with overlap delayed, bit for bit, and copy the result where it is sent from."""
        from hocket.kernels import merge_delayed

        combined, sent = (flat[: segment.numel].numpy() for flat in (segment.incoming, segment.outgoing))
        finite = merge_delayed(target.numpy(), combined, self.opened.scale, sent, sends=sends)
        if sends:
            self._copied[segment.index] = finite

    def merge_all(self, *, sends: bool = False) -> None:
        """Finish and merge everything that is under way, or due; `sends` says whether `start` follows."""
        self.begin()
        if self.opened.idle:
            return
        if self.overlap is Overlap.DELAYED:
            self.bias()
        for index in self._places:
            self.merge(index, sends=sends)

    def _refuse_nonfinite(self, segment: Segment, target: Tensor) -> None:
        # One pass, which a single NaN or Inf poisons; only then each parameter on its own.
        if not math.isfinite(float(target.sum())):
            self._raise_nonfinite(segment, target, (self.opened.peer.rank,))

    def _raise_nonfinite(self, segment: Segment, values: Tensor, ranks: Sequence[int]) -> None:
        """Raise for NaN or Inf in what `ranks` of the scope gave; `values` hold it, whoever it came from."""
        names = [s.name for s in segment.spans if not bool(torch.isfinite(values[s.start : s.stop]).all())]
        if names:
            whose = " and ".join(str(self.opened.ranks[rank]) for rank in ranks)
            raise NonFiniteError(
                f"parameter {some(names)} of rank {whose} is NaN or Inf after step {self._step}, in what "
                f"{self.opened.exchange.name} exchanges: lower the learning rate, or clip gradients"
            )


def _fuses(segment: Segment, target: Tensor) -> bool:
    """Return whether one compiled pass is worth its start, and can be: on the CPU, of one dtype."""
    same = target.dtype == segment.outgoing.dtype == segment.incoming.dtype
    return same and target.device.type == "cpu" and segment.numel >= _SMALLEST_FUSED


class ParameterSync:
    """Carries out the slot's exchanges, in order, after each step."""

    def __init__(self, exchanges: Sequence[ParameterMix]) -> None:
        self.exchanges = exchanges

    @property
    def has_weights(self) -> bool:
        """Whether push-sum weights travel."""
        return any(exchange.weights for exchange in self.exchanges)

    @torch.no_grad()
    def before_step(self) -> None:
        """Make parameters hold what the optimizer steps: what no forward has read since the last step, too."""
        self.merge_forward()
        for exchange in self.exchanges:
            exchange.bias()

    @torch.no_grad()
    def debias(self) -> None:
        """Make parameters hold what the model computes with, between the steps of two optimizers."""
        for exchange in self.exchanges:
            exchange.debias()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Merge what is under way and start what is due after step number `step`, counted from 1."""
        for exchange in self.exchanges:
            sends = step % exchange.opened.exchange.period(exchange.opened.peer.size) == 0
            exchange.merge_all(sends=sends)
            if sends:
                exchange.start(step)
                if exchange.overlap is Overlap.NONE:
                    exchange.merge_all()
            exchange.debias()

    def unrounded(self) -> list[Unrounded]:
        """Return the push-sum values for which parameters are too short."""
        return [unrounded for exchange in self.exchanges for unrounded in exchange.unrounded.values()]

    def push_sums(self) -> list[PushSums]:
        """Return the weights and copies of the values for which parameters are too short, by exchange."""
        return [(exchange.weights, exchange.values()) for exchange in self.exchanges]

    def reset_weights(self) -> None:
        """Take parameters as they are for what push-sum's values are divided to, of weight 1."""
        for exchange in self.exchanges:
            exchange.set_weights(dict.fromkeys(exchange.weights, 1.0))

    def restore(self, push_sums: Sequence[PushSums]) -> None:
        """Take parameters as they are for what these push-sums, from `push_sums`, are divided to."""
        for exchange, (weights, values) in zip(self.exchanges, push_sums, strict=True):
            exchange.set_weights(weights, values)

    @torch.no_grad()
    def settle(self) -> None:
        """Merge everything that is under way."""
        for exchange in self.exchanges:
            exchange.merge_all()
            exchange.debias()

    @torch.no_grad()
    def merge_forward(self) -> None:
        """Merge what overlap forward has under way, as the next forward would."""
        for exchange in self.exchanges:
            if exchange.overlap is Overlap.FORWARD:
                exchange.merge_all()
                exchange.debias()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the open exchanges' state.

        What overlap forward has under way is merged, as the next forward would merge it.
        """
        self.merge_forward()
        return {exchange.opened.exchange.name: exchange.state_dict() for exchange in self.exchanges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank."""
        for exchange in self.exchanges:
            exchange.load_state_dict(state[exchange.opened.exchange.name])
