"""A penalty on the gradient for the inputs (R1), in a loss that is differentiated twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y, reduction="none")
        [slope] = torch.autograd.grad(loss.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (loss.mean() + 0.5 * slope.square().sum(1).mean()).backward()
        optimizer.step()
    return {}
