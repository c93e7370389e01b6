"""Several tasks whose weights are learned, and of which some steps have only one; losses one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from idioms.batches import classified, mlp
from idioms.side import Side, Told


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.value = mlp(6, 8), mlp(8, 3, seed=1), mlp(8, 1, seed=2)
        self.log_variances = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def train(side: Side) -> Told:
    model = Tasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    side.attach(model, optimizer)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        hidden = torch.tanh(model.trunk(x))
        losses = [F.cross_entropy(model.classes(hidden), y)]
        if step % 3 != 1:
            losses.append(F.mse_loss(model.value(hidden)[:, 0], x.sum(1)))
        scales = (-model.log_variances).exp()
        total = sum(scales[number] * loss + model.log_variances[number] for number, loss in enumerate(losses))
        optimizer.zero_grad()
        torch.as_tensor(total).backward()
        optimizer.step()
    return {}
