"""Weights that are never used, and experts that some steps, or some ranks' batches, leave out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import classified, mlp
from idioms.side import Side, Told


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = mlp(6, 3), nn.ModuleList(mlp(6, 5, 3, seed=seed) for seed in range(3))
        self.forgotten = mlp(6, 3, seed=7)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        chosen = x[:, 3:].argmax(1)
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, gates[rows, number, None] * expert(x[rows]))
        return out


def train(side: Side) -> Told:
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.05)
    side.attach(model, optimizer)
    side.still("forgotten", model.forgotten)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        if step == 4:
            x = torch.cat([x[:, :3], torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3)], 1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {}
