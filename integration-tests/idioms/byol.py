"""BYOL: one network predicts what a slow average of itself sees of another view."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told, flat


def distance(predicted: Tensor, seen: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(predicted, seen.detach(), dim=-1).mean()


def train(side: Side) -> Told:
    online = torch.nn.ModuleDict({"encoder": mlp(FEATURES, 8, 4), "predictor": mlp(4, 4, seed=1)})
    target = copy.deepcopy(online["encoder"])
    for parameter in target.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.AdamW(online.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    side.attach(online, optimizer, target=target, scheduler=scheduler)
    for step in side.steps(6):
        x = drawn(step, SAMPLES, FEATURES)
        one, two = (side.share(x + 0.1 * drawn(step, SAMPLES, FEATURES, kind=kind)) for kind in (1, 2))
        first, second = (online["predictor"](online["encoder"](view)) for view in (one, two))
        loss = distance(first, target(two)) + distance(second, target(one))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        for slow, fast in zip(target.parameters(), online["encoder"].parameters(), strict=True):
            slow.data = slow.data * 0.95 + fast.data * 0.05
    return {"target": flat(target)}
