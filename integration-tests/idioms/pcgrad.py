"""PCGrad: a backward for each task, gradients kept by reference, projected on each other and put back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from idioms.batches import classified, mlp
from idioms.side import Side, Told

#: Gradients are read between backward and step.
EDITS = True


def projected(gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return the sum of the tasks' gradients, without what is against another task's."""
    flat = [torch.cat([each.reshape(-1) for each in of_task]) for of_task in gradients]
    surgery = [each.clone() for each in flat]
    for number, own in enumerate(surgery):
        for other in flat[:number] + flat[number + 1 :]:
            own.sub_((own @ other).clamp(max=0) / other.square().sum() * other)
    summed = torch.stack(surgery).sum(0)
    pieces = summed.split([each.numel() for each in gradients[0]])
    return [piece.view_as(each) for piece, each in zip(pieces, gradients[0], strict=True)]


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        logits = model(x)
        gradients = []
        for loss in (F.cross_entropy(logits, y), F.cross_entropy(logits, (y + 1) % 3)):
            optimizer.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in zip(model.parameters(), projected(gradients), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {}
