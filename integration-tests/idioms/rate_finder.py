"""A search for the learning rate before training: the rate rises, and all that was changed is put back."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    session = side.attach(model, optimizer)
    losses = torch.zeros(4)
    for step in side.steps(8):
        if step == 4:
            session.settle()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = 0.05
        x, y = map(side.share, classified(step))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if step < 4:
            losses[step] = sum(session.gather(loss.item())) / session.size
            optimizer.param_groups[0]["lr"] *= 1.5
        optimizer.step()
    return {}
