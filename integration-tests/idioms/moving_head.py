"""A layer that is begun anew in mid-training, with the optimizer's memory of it, as continual learning does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model: Any = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    session = side.attach(model, optimizer)
    for step in side.steps(7):
        if step == 4:
            session.settle()
            torch.manual_seed(3)
            model[2].reset_parameters()
            for parameter in model[2].parameters():
                optimizer.state[parameter].clear()
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), (y + step // 4) % 3).backward()
        optimizer.step()
    return {}
