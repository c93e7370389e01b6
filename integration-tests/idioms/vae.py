"""A variational autoencoder with two learning rates, whose weight of the prior rises."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told


def train(side: Side) -> Told:
    model = nn.ModuleDict({"encoder": mlp(FEATURES, 8, 4), "decoder": mlp(2, 8, FEATURES, seed=1)})
    groups: list[dict[str, Any]] = [
        {"params": model["encoder"].parameters(), "lr": 0.01},
        {"params": model["decoder"].parameters()},
    ]
    optimizer = torch.optim.Adamax(groups, lr=0.02)
    side.attach(model, optimizer)
    for step in side.steps(6):
        x = side.share(drawn(step, SAMPLES, FEATURES))
        mean, log_variance = model["encoder"](x).chunk(2, -1)
        code = mean + (0.5 * log_variance).exp() * side.share(drawn(step, SAMPLES, 2, kind=1))
        prior = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        loss = F.mse_loss(model["decoder"](code), x, reduction="sum") / len(x) + min(1.0, step / 4) * prior
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {}
