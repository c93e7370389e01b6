"""Optimizers for copies of the weights, like the user's own, whose values (learning rate, ...) they follow."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hocket.api import MakeOptimizer, plain
from hocket.errors import AttachError


class Follower:
    """An optimizer over other tensors than the user's, with the user's group values before each step.

    Its state is its own, and is made by its first step.

    Args:
        followed: the user's.
        tensors: the tensor in place of each parameter; parameters that are not in it are left out.
        make: makes an optimizer of parameter groups; None to copy the user's.

    Raises:
        AttachError: none of the optimizer's parameters is in `tensors`, or the optimizer cannot be copied.
    """

    def __init__(
        self,
        followed: torch.optim.Optimizer,
        tensors: Mapping[nn.Parameter, Tensor],
        make: MakeOptimizer | None,
    ) -> None:
        self.followed = followed
        #: The number of the user's group that each group follows.
        self._groups: list[int] = []
        groups = []
        for number, group in enumerate(followed.param_groups):
            own = [tensors[parameter] for parameter in group["params"] if parameter in tensors]
            if own:
                self._groups.append(number)
                groups.append({**group, "params": own})
        if not groups:
            raise AttachError("the optimizer holds no parameter of this stage: build it over the whole model")
        self.optimizer = _copied(followed, groups) if make is None else make(groups)

    def follow(self, followed: torch.optim.Optimizer | None = None) -> None:
        """Take over the values of the user's groups, or of another follower's optimizer over the same stage."""
        groups = (
            [self.followed.param_groups[number] for number in self._groups]
            if followed is None
            else followed.param_groups
        )
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})


def _copied(optimizer: torch.optim.Optimizer, groups: list[plain.Tree]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class over other groups, without state and hooks."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise AttachError(
            "LBFGS evaluates the loss several times in a step, which a pipeline cannot do: use another optimizer"
        )
    # torch's optimizers pickle defaults, groups and state; hooks are left out.
    made = copy.copy(optimizer)
    made.state = defaultdict(dict)
    made.param_groups = groups
    return made
