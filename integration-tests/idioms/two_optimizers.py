"""Two optimizers: one for matrices, one for all else, each with a scheduler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ExponentialLR, LinearLR

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = mlp(6, 8, 8, 3)
    of_matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9)
    of_rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01)
    falling, rising = ExponentialLR(of_matrices, 0.9), LinearLR(of_rest, 0.1, total_iters=4)
    side.attach(model, [of_matrices, of_rest], falling=falling, rising=rising)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        for optimizer in (of_matrices, of_rest):
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in (of_matrices, of_rest, falling, rising):
            each.step()
    return {}
