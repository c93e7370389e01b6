"""Validation in the loop: the model in evaluation mode, metrics gathered, the best weights kept."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = torch.nn.Sequential(mlp(6, 8), torch.nn.Dropout(0.0), mlp(8, 3, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    session = side.attach(model, optimizer, scheduler=scheduler)
    best, losses = copy.deepcopy(model.state_dict()), torch.zeros(6)
    for step in side.steps(6):
        model.train()
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with session.consensus(), torch.no_grad():
            x, y = map(side.share, classified(step % 2, kind=1))
            of_ranks = session.gather(F.cross_entropy(model(x), y).item())
            loss = sum(of_ranks) / len(of_ranks)
            if loss < losses[:step].min().item() if step else True:
                best = copy.deepcopy(model.state_dict())
        losses[step] = loss
        scheduler.step(loss)
    assert best.keys() == model.state_dict().keys()
    return {"rate": torch.tensor(optimizer.param_groups[0]["lr"])}
