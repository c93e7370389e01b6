"""EMA by torch's AveragedModel, with the buffers averaged too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from idioms.batches import classified, mlp
from idioms.side import Side, Told, flat


def train(side: Side) -> Told:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    session = side.attach(model, optimizer, average=average)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        session.settle()
        average.update_parameters(model)
    return {"average": flat(average)}
