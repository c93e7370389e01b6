"""A convolutional network with BatchNorm, in channels-last, with Nesterov momentum and a warm-up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms.batches import images
from idioms.side import Side, Told

#: BatchNorm sees a rank's own samples.
EXACT = False


def train(side: Side) -> Told:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    model.double().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    side.attach(model, optimizer, warm_up=warm_up)
    for step in side.steps(6):
        x = images(step)
        x[::2] = x[::2].flip(2)
        x, y = side.share(x), side.share(torch.arange(len(x)) % 2)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        warm_up.step()
    return {}
