"""Schedule-free SGD: evaluated at an average that the optimizer keeps, and trained at another point."""

from __future__ import annotations

import schedulefree
import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told

NEEDS = ("schedulefree",)


def train(side: Side) -> Told:
    model = mlp()
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.3, warmup_steps=2)
    session = side.attach(model, optimizer)
    for step in side.steps(6):
        model.train()
        optimizer.train()
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 3 == 2:
            session.settle()
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                model(x)
    session.settle()
    optimizer.eval()
    return {}
