"""Contrastive learning by parts: representations first, then a backward for each part with the cached gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told

#: Negatives are a rank's own samples.
EXACT = False


def train(side: Side) -> Told:
    model = mlp(FEATURES, 8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    session = side.attach(model, optimizer)
    for step in side.steps(6):
        x = drawn(step, SAMPLES, FEATURES)
        one = side.share(x)
        two = side.share(x + 0.1 * drawn(step, SAMPLES, FEATURES, kind=1))
        pieces = [*one.chunk(2), *two.chunk(2)]
        session.settle()
        with torch.no_grad():
            seen = torch.cat([model(piece) for piece in pieces])
        seen.requires_grad_()
        left, right = F.normalize(seen, dim=1).chunk(2)
        F.cross_entropy(left @ right.T / 0.2, torch.arange(len(left))).backward()
        assert seen.grad is not None
        gradients = seen.grad.split([len(piece) for piece in pieces])
        optimizer.zero_grad()
        for number, (piece, gradient) in enumerate(zip(pieces, gradients, strict=True)):
            if number < len(pieces) - 1:
                with session.accumulate():
                    model(piece).backward(gradient)
            else:
                model(piece).backward(gradient)
        optimizer.step()
    return {}
