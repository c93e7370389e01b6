"""NAdam, RAdam and ASGD side by side, whose states hold numbers besides tensors of the parameters' shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = mlp(6, 8, 8, 3)
    one, two, three = (list(model[number].parameters()) for number in (0, 2, 4))
    optimizers = [
        torch.optim.NAdam(one, lr=0.02),
        torch.optim.RAdam(two, lr=0.02),
        torch.optim.Rprop(three, lr=0.02),
    ]
    side.attach(model, optimizers)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {}
