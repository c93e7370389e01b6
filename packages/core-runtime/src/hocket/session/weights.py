"""How much this rank's gradients count in a step, also when its data ended in the middle of an accumulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["NOTHING", "BatchWeights", "Contribution"]


@dataclass(frozen=True)
class Contribution:
    """What a rank puts into a step's mean.

    Attributes:
        weight: how much it counts in the sum of weights.
        factor: what its gradients are multiplied by.
        kept: the gradients to send in place of `p.grad`, where the current batch is only a repetition and what
            its backward added must not count; None where `p.grad` itself is meant.
    """

    weight: float
    factor: float
    kept: dict[nn.Parameter, Tensor | None] | None = None


#: Taking part without a gradient of one's own.
NOTHING = Contribution(0.0, 0.0, {})


class BatchWeights:
    """The weights of the batches of one step.

    With accumulation over K batches the user divides each loss by K. So if only k of them were real on this rank,
    its gradient has k/K of the size already: only its weight must say so too.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._weights = [1.0]
        self._kept: dict[nn.Parameter, Tensor | None] | None = None
        self.accumulated = False

    @property
    def current(self) -> float:
        """The current batch's weight."""
        return self._weights[-1]

    def begin_batch(self, weight: float) -> None:
        """Take note of the next batch; what `p.grad` holds belongs to its step if the one before accumulated."""
        if self.accumulated:
            self._put_back()
        else:
            self._weights = []
        self._weights.append(weight)
        self._kept = None
        if weight == 0:
            self._kept = {p: p.grad if self.accumulated else None for p in self._parameters}
            if self.accumulated:
                # The repetition's backward must add to tensors of its own.
                for parameter in self._parameters:
                    parameter.grad = None
        self.accumulated = False

    def contribution(self) -> Contribution:
        """Return what this rank puts into the step that the current batch ends."""
        real = [weight for weight in self._weights if weight != 0]
        if not real:
            return Contribution(0.0, 0.0, self._kept)
        return Contribution(sum(self._weights) / len(self._weights), sum(real) / len(real), self._kept)

    def drop_repetition(self) -> None:
        """Leave in `p.grad` only what real batches gave, for strategies that send no gradients."""
        self._put_back()

    def _put_back(self) -> None:
        if self._kept is not None:
            for parameter, gradient in self._kept.items():
                parameter.grad = gradient
