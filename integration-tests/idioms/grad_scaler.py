"""A GradScaler with unscaled clipping, in which a step that overflows is left out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import classified, mlp
from idioms.side import Side, Told

#: Gradients are changed between backward and step.
EDITS = True

#: The step whose loss is Inf.
OVERFLOWS = 2
SKIPPED = 1


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    side.attach(model, optimizer, scaler=scaler)
    for step in side.steps(7):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (float("inf") if step == OVERFLOWS else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return {"scale": torch.tensor(scaler.get_scale())}
