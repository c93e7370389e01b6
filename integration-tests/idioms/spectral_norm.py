"""Spectral norm, whose vectors follow the weight in every forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from idioms.batches import classified
from idioms.side import Side, Told


def train(side: Side) -> Told:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        spectral_norm(nn.Linear(6, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    norm = torch.linalg.matrix_norm(model[0].weight.detach(), 2)
    assert 0.8 < norm < 1.5, norm
    return {}
