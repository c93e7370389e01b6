"""Early stop: all ranks leave the loop in mid-epoch, when the mean loss rises; the best weights return."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.95)
    session = side.attach(model, optimizer)
    loader = side.loader(classified(number) for number in range(3))
    for _ in side.steps(5):
        best, state = float("inf"), copy.deepcopy(model.state_dict())
        for x, y in session.data(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = sum(session.gather(loss.item())) / session.size
            if mean > best + 0.5:
                break
            if mean < best:
                best, state = mean, copy.deepcopy(model.state_dict())
        session.settle()
        model.load_state_dict(state)
    return {}
