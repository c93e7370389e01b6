"""Several epochs over a loader of uneven length for the ranks; the job may be ended in the middle of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told

BATCHES = 4


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    session = side.attach(model, optimizer)
    loader = side.loader(classified(number) for number in range(BATCHES))
    for epoch in range(side.place // BATCHES, 2):
        for x, y in session.data(loader):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / (1 + epoch)).backward()
            optimizer.step()
            side.reach(side.place + 1)
    return {}
