"""A tiny world to act in: a point that an action pushes, and that is to stay near zero."""

from __future__ import annotations

import torch
from torch import Tensor

from idioms.batches import drawn

STATES, ACTIONS = 3, 2


def started(step: int, places: int) -> Tensor:
    """Return where each of several points begins."""
    return drawn(step, places, STATES, kind=7)


def pushed(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state and the reward of each point."""
    pushes = torch.cat([action, action.sum(-1, keepdim=True)], -1)
    then = (0.9 * state + 0.3 * torch.tanh(pushes)).detach()
    return then, -then.square().sum(-1)
