"""Classification as timm trains it: mixup, soft targets, a schedule by steps, and ModelEmaV2, which is validated."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.batches import CLASSES, classified, mlp
from idioms.side import Side, Told, flat


class ModelEmaV2(nn.Module):
    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(self.decay * mean + (1.0 - self.decay) * value)


def mixup(x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Mix a whole batch's samples with those of the same batch in another order, by one ratio."""
    ratio = 0.5 + 0.1 * (step % 5)
    targets = F.one_hot(y, CLASSES).double() * 0.9 + 0.1 / CLASSES
    return ratio * x + (1 - ratio) * x.flip(0), ratio * targets + (1 - ratio) * targets.flip(0)


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    average = ModelEmaV2(model, 0.9)
    session = side.attach(model, optimizer, average=average, schedule=schedule)
    for step in side.steps(6):
        model.train()
        x, targets = map(side.share, mixup(*classified(step), step))
        loss = -(targets * F.log_softmax(model(x), -1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.settle()
        average.update(model)
        schedule.step()
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                average.module(x), model(x)
    return {"average": flat(average)}
