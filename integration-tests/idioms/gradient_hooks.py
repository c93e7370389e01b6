"""Hooks of the user: tensors' that scale gradients, a module's and an optimizer's that look."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model: Any = mlp(6, 8, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped, seen = [], []
    model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    model[2].register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape))
    side.attach(model, optimizer)
    model[4].weight.register_hook(lambda gradient: 3 * gradient)
    optimizer.register_step_pre_hook(lambda *_: stepped.append(model[0].weight.grad is not None))
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all(stepped)
    assert len(stepped) == len(seen)
    return {}
