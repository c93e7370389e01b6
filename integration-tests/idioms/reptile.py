"""Reptile: copies of the model take steps of their own, and the way that they have gone is the gradient."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told

#: Copies see a rank's own samples, and steps do not add up.
EXACT = False


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session = side.attach(model, optimizer)
    for step in side.steps(6):
        session.settle()
        inner = copy.deepcopy(model)
        of_inner = torch.optim.SGD(inner.parameters(), lr=0.1)
        for turn in range(2):
            x, y = map(side.share, classified(step, kind=turn))
            of_inner.zero_grad()
            F.cross_entropy(inner(x), y).backward()
            of_inner.step()
        optimizer.zero_grad()
        for outer, gone in zip(model.parameters(), inner.parameters(), strict=True):
            outer.grad = outer.detach() - gone.detach()
        optimizer.step()
    return {}
