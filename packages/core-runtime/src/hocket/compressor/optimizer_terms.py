"""The terms of torch's SGD that a compressor may take over: momentum and weight decay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.errors import AttachError
from hocket.plain import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class OptimizerTerms:
    """The terms of one parameter in one step, as in `torch.optim.SGD`.

    Attributes:
        parameter: it itself, whose values before the step are read for weight decay.
        momentum: m, the share of the last step's velocity that is kept; 0 for none.
        weight_decay: the factor of the parameter when it is added to the gradient.
        nesterov: whether the step looks ahead by another m times the velocity.
        continues: whether the round adds to an earlier one of the same step, whose velocity has been multiplied by m
            and holds weight decay already: its gradient is added to the velocity, and what is sent is what that
            changes of the step, the gradient, or with Nesterov 1 + m times that.
    """

    parameter: Tensor
    momentum: float
    weight_decay: float
    nesterov: bool = False
    continues: bool = False

    def continued(self) -> OptimizerTerms:
        """Return the terms of another round of the same step."""
        return replace(self, weight_decay=0.0, continues=True)

    def accelerate(self, gradient: Tensor, velocity: Tensor) -> None:
        """Update the velocity and write the step over a gradient that has weight decay in it, as torch's SGD does."""
        if not self.momentum:
            return
        if self.continues:
            velocity.add_(gradient)
            if self.nesterov:
                gradient.mul_(1 + self.momentum)
            return
        velocity.mul_(self.momentum).add_(gradient)
        if self.nesterov:
            gradient.add_(velocity, alpha=self.momentum)
        else:
            gradient.copy_(velocity)


def optimizer_terms(optimizer: torch.optim.Optimizer) -> dict[Tensor, OptimizerTerms]:
    """Return the terms of every parameter, as the param groups have them now, since schedulers change them.

    A caller that takes them over runs the optimizer's own step with momentum and weight decay at 0.

    Raises:
        AttachError: not SGD, or with dampening or `maximize`, which are not supported.
    """
    import torch

    from hocket.segment.shards import part_of

    if not isinstance(optimizer, torch.optim.SGD):
        raise AttachError(
            f"momentum correction needs the momentum of torch.optim.SGD, not that of {type(optimizer).__name__}: use "
            "SGD"
        )
    terms: dict[Tensor, OptimizerTerms] = {}
    for group in optimizer.param_groups:
        own = settings_of(group)
        parts = map(part_of, group["params"])
        terms |= {part: OptimizerTerms(part, *own) for part in parts}
    return terms


def settings_of(group: Tree) -> tuple[float, float, bool]:
    """Return momentum, weight decay, and whether the step looks ahead, of a group of parameters.

    Raises:
        AttachError: it has dampening or `maximize`.
    """
    for name in ("dampening", "maximize"):
        if group[name]:
            raise AttachError(
                f"momentum correction does not work with {name} of torch.optim.SGD, which is {group[name]}: leave it "
                "out"
            )
    return float(group["momentum"]), float(group["weight_decay"]), bool(group["nesterov"])
