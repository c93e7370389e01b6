"""Pruning in mid-training: the smallest weights are set to zero, and held there after each step."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = mlp(6, 8, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    masks = [torch.ones_like(p) for p in matrices]
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for number, parameter in enumerate(matrices):
                if step >= 2:
                    masks[number] = (parameter.abs() > 0.1).to(parameter)
                parameter.mul_(masks[number])
    return {}
