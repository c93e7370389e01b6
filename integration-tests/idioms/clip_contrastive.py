"""CLIP: two encoders in one module, all ranks' features as negatives, a logit scale that is clamped after a step."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import FEATURES, SAMPLES, drawn, mlp
from idioms.side import Side, Told


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = mlp(FEATURES, 8, 4), mlp(FEATURES, 8, 4, seed=1)
        self.logit_scale = nn.Parameter(torch.ones((), dtype=torch.float64) * math.log(1 / 0.07))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            F.normalize(self.visual(image), dim=-1),
            F.normalize(self.text(text), dim=-1),
            self.logit_scale.exp(),
        )


def gathered(session: Any, own: Tensor, rank: int) -> Tensor:
    """Return all ranks' features, rank by rank; ranks' mean of gradients is that of them all."""
    features = [torch.tensor(each, dtype=own.dtype) for each in session.gather(own.tolist())]
    features[rank] = own + (len(features) - 1) * (own - own.detach())
    return torch.cat(features)


def train(side: Side) -> Told:
    model = CLIP()
    groups: list[dict[str, Any]] = [
        {"params": [model.logit_scale], "weight_decay": 0.0},
        {"params": [p for name, p in model.named_parameters() if name != "logit_scale"]},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=0.05,
        weight_decay=0.2,
        betas=(0.9, 0.98),
    )
    session = side.attach(model, optimizer)
    for step in side.steps(6):
        image = side.share(drawn(step, SAMPLES, FEATURES))
        text = side.share(drawn(step, SAMPLES, FEATURES) + 0.3 * drawn(step, SAMPLES, FEATURES, kind=1))
        images, texts, scale = model(image, text)
        all_images, all_texts = (gathered(session, own, side.rank) for own in (images, texts))
        logits = scale * all_images @ all_texts.T
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
    return {}
