"""Distillation: the teacher is a frozen part of the student's module, in evaluation mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import CLASSES, FEATURES, classified, mlp
from idioms.side import Side, Told


class Distiller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = nn.Sequential(mlp(FEATURES, 16, seed=5), nn.BatchNorm1d(16), mlp(16, CLASSES, seed=6))
        self.teacher.double().requires_grad_(False)

    def train(self, mode: bool = True) -> Distiller:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.student(x)
        with torch.no_grad():
            taught = self.teacher(x)
        soft = F.kl_div(logits.log_softmax(-1), taught.softmax(-1), reduction="batchmean")
        return 0.5 * soft + 0.5 * F.cross_entropy(logits, y)


def train(side: Side) -> Told:
    model = Distiller().train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    side.still("teacher", model.teacher)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return {}
