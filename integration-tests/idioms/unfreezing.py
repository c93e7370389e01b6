"""Progressive unfreezing: the head is trained first, then more layers, and an early layer is frozen again."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = mlp(6, 8, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    side.attach(model, optimizer)
    for step in side.steps(9):
        model[0].requires_grad_(3 <= step < 6)
        model[2].requires_grad_(step >= 3)
        if step == 6:
            side.still("first layer", model[0])
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {}
