"""An optimizer whose moments are of 8 bits, in tensors of a class of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torchao.optim import AdamW8bit

from idioms.batches import FEATURES, classified, mlp
from idioms.side import Side, Told

NEEDS = ("torchao",)


def train(side: Side) -> Told:
    # Tensors of fewer than 4096 elements have moments of full width.
    model = mlp(FEATURES, 64, 64, 3)
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    side.attach(model, optimizer)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    return {}
