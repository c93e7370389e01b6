"""Activation checkpointing, of a part and of a sequence, without reentrance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from idioms.batches import classified, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = torch.nn.ModuleDict({"first": mlp(6, 8, 8), "middle": mlp(8, 8, 8, 8), "last": mlp(8, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    for step in side.steps(5):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        hidden = model["first"](x)
        hidden = checkpoint(model["middle"], hidden, use_reentrant=False)
        hidden = checkpoint_sequential(model["middle"], 2, hidden, use_reentrant=False)
        F.cross_entropy(model["last"](hidden), y).backward()
        optimizer.step()
    return {}
