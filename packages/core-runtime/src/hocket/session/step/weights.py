"""The weight of this rank's gradients in a step, also when its data ended within an accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hocket.arrays import Array
from hocket.session.step.state import StepState
from hocket.session.torch_internals import at_end_of_backward, current_backward
from hocket.transport.peer import Peer
from hocket.transport.request import Request


@dataclass(frozen=True)
class Contribution:
    """The contribution of this rank to a step's mean: its weight and its factor.

    Attributes:
        weight: its share in the sum of weights.
        factor: the factor of its gradients.
        kept: the gradients to send in place of `p.grad`, where the current batch is only a repetition, whose backward
            must not count; None to send `p.grad` itself.
    """

    weight: float
    factor: float
    kept: dict[Tensor, Tensor | None] | None = None


#: Taking part without a gradient of one's own.
NOTHING = Contribution(0.0, 0.0, {})


class Agreement:
    """The ranks' agreement on a step's weights and finiteness before residuals are updated.

    - Weights, when backward begins: contributions are divided by the ranks' mean weight before they are sent, not
    after. Residuals are then in the same unit as sent values, whatever the weights of later rounds.
    - Parameters with a gradient on any rank, when backward has ended: their momentum goes on, on all ranks.
    - NaN or Inf in a gradient of any rank: such a step is skipped.

    Args:
        peer: the ranks whose contributions end in one mean; collective.
        num_parameters: number of parameters of all segments together.
        weighs: whether they agree on weights.
        wait_for: carries out an exchange, given its start, name and bytes, and counts the wait.
    """

    def __init__(
        self,
        peer: Peer,
        num_parameters: int,
        *,
        weighs: bool,
        wait_for: Callable[[Callable[[], Request], str, int], None],
    ) -> None:
        self.peer = peer
        self._wait_for = wait_for
        self._lane = peer.lane("weights")
        self._weighs = weighs
        #: The ranks' mean weight, by which contributions were divided; 1 where they were not.
        self.mean = 1.0
        # Behind the parameters: the weight when backward begins, and whether something is NaN or Inf when it has ended.
        self._own, self._sum = np.zeros(num_parameters + 1), np.zeros(num_parameters + 1)

    def weigh(self, given: Contribution) -> Contribution:
        """Return this rank's contribution, scaled so that the ranks' weights have the mean 1; collective."""
        if not self._weighs:
            return given
        self._own[-1] = given.weight
        self._exchange(self._own[-1:], self._sum[-1:], "weights")
        self.mean = float(self._sum[-1]) / self._lane.size or 1.0
        return replace(given, weight=given.weight / self.mean, factor=given.factor / self.mean)

    def agree(self, present: Sequence[Array], anywhere: Sequence[Array], *, finite: bool) -> bool:
        """Find the gradients that any rank has, and whether all are finite; collective.

        Args:
            present: by segment, whether this rank has a gradient of each parameter.
            anywhere: of the same lengths; set to whether any rank has one.
            finite: whether no gradient of this rank is NaN or Inf.

        Returns:
            Whether all gradients are finite on all ranks.
        """
        np.concatenate(present, out=self._own[:-1])
        self._own[-1] = not finite
        self._exchange(self._own, self._sum, "presence")
        start = 0
        for values in anywhere:
            values[:] = self._sum[start : start + len(values)] != 0
            start += len(values)
        return not self._sum[-1]

    def _exchange(self, own: Array, total: Array, what: str) -> None:
        self._wait_for(lambda: self._lane.iallreduce(own, total), what, own.nbytes)

    def close(self) -> None:
        """Close the lane; collective."""
        self._lane.close()


class BatchWeights:
    """The weights of the batches of one step.

    With accumulation over K batches the user divides each loss by K. So if only k of them were real on this rank,
    its gradient has k/K of the size already: only its weight must say so too.

    Args:
        parameters: the trainable ones.
        state: the session's, which knows whether gradients were only added up.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], state: StepState) -> None:
        self._parameters = list(parameters)
        self._state = state
        self._weights = [1.0]
        #: By what `p.grad` has to be multiplied to be the sum of its batches' gradients times their weights.
        self._unit = 1.0
        self._kept: dict[Tensor, Tensor | None] | None = None
        self._handles: list[RemovableHandle] = []
        self._backward = -1
        self._put_back_already = False
        self._outside = True
        #: The sum of the weights of all batches so far that were not left out; a step outside of `session.data` is one.
        self.total = 0.0
        self._total_before = 0.0
        #: Whether the batches of the step under way are in it.
        self._counted = False
        #: Whether the optimizer gets this rank's own gradients.
        self.gradients_stay_local = False

    @property
    def current(self) -> float:
        """Return the current batch's weight."""
        return self._weights[-1]

    def begin_batch(self, weight: float) -> None:
        """Begin the next batch; accumulated gradients belong to its step."""
        accumulated = self._state.accumulated
        self.close()
        self._outside = False
        if accumulated:
            self._put_back()
            self._weigh_anew(weight)
        else:
            self._weights, self._unit = [], weight
        self._weights.append(weight)
        self._total_before = self.total
        self.total += weight
        self._counted = True
        self._kept = None
        if weight == 0:
            self._kept = {p: p.grad if accumulated else None for p in self._parameters}
            if accumulated:
                # The repetition's backward must add to tensors of its own.
                for parameter in self._parameters:
                    parameter.grad = None
                if self.gradients_stay_local:
                    self._watch_backward()
        self._put_back_already = False

    def leave_out(self) -> None:
        """Give the current batch weight 0, as it was skipped."""
        self._weights[-1] = 0.0
        self.total = self._total_before
        if not self.any_counts:
            self._kept = {}

    @property
    def several(self) -> bool:
        """Tell whether earlier batches have begun the current one's step."""
        return len(self._weights) > 1

    @property
    def any_counts(self) -> bool:
        """Tell whether any batch of the step counts."""
        return any(self._weights)

    def _weigh_anew(self, weight: float) -> None:
        """Rescale accumulated gradients to the unit of the next batch's weight, which will multiply all of them."""
        before, self._unit = self._unit, weight or self._unit
        if self.gradients_stay_local or not before or before == self._unit:
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * (before / self._unit)

    def end_step(self) -> None:
        """End a step: the next batch belongs to another one."""
        if self._outside:
            self.total += not self._counted
            self._reset()

    def end_pass(self) -> None:
        """End the loop over batches: later backwards count as batches without a loop do."""
        self._outside = True
        if not self._state.accumulated:
            self._reset()

    def _reset(self) -> None:
        self.close()
        self._weights, self._unit = [1.0], 1.0
        self._kept = None
        self._counted = False

    def contribution(self) -> Contribution:
        """Return this rank's contribution to the step that the current batch ends."""
        real = [weight for weight in self._weights if weight != 0]
        if not real:
            return Contribution(0.0, 0.0, self._kept)
        return Contribution(sum(self._weights) / len(self._weights), self._unit, self._kept)

    def drop_repetition(self, parameters: Iterable[Tensor]) -> None:
        """Reduce `p.grad` of `parameters` to real batches' gradients, for strategies that send none."""
        if self._kept is not None and not self._put_back_already:
            for parameter in parameters:
                if parameter in self._kept:
                    parameter.grad = self._kept[parameter]

    def close(self) -> None:
        """Take the batch's hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def unhook(self) -> None:
        """Take all hooks off, at the session's end."""
        self.close()

    def _watch_backward(self) -> None:
        """Restore real gradients at the end of a repetition's backward, before they are clipped or unscaled."""
        # Parameters' hooks keep alive what they refer to: see `hocket.session.step.gradients`.
        weights_ref = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            self = weights_ref()
            if self is not None and current_backward() != self._backward:
                self._backward = current_backward()
                at_end_of_backward(self._put_back_copies)

        self._handles = [
            p.register_post_accumulate_grad_hook(arrived) for p in self._parameters if p.requires_grad
        ]

    def _put_back_copies(self) -> None:
        if all(gradient is None for gradient in (self._kept or {}).values()):
            return  # a scaler cannot do without any; the step will
        # Copies: another backward would add to them.
        self._put_back_already = True
        for parameter, gradient in (self._kept or {}).items():
            parameter.grad = None if gradient is None else gradient.clone()

    def _put_back(self) -> None:
        if self._kept is not None:
            for parameter, gradient in self._kept.items():
                parameter.grad = gradient
