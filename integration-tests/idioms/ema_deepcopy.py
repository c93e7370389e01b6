"""EMA by a copy of the model, which is evaluated now and then."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told, flat


@torch.no_grad()
def update(average: torch.nn.Module, model: torch.nn.Module, decay: float = 0.9) -> None:
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mean.copy_(mean * decay + (1.0 - decay) * value)


def train(side: Side) -> Told:
    model = mlp()
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    session = side.attach(model, optimizer, average=average)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        session.settle()
        update(average, model)
        if step % 3 == 2:
            with torch.no_grad():
                average(x)
    return {"average": flat(average)}
