"""Gradients that are worked on before the step: clipped by each unit, centred, with noise, and logged."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from idioms.batches import classified, drawn, mlp
from idioms.side import Side, Told

#: Gradients are changed between backward and step.
EDITS = True


def train(side: Side) -> Told:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.attach(model, optimizer)
    norms: list[float] = []
    for step in side.steps(6):
        x, y = map(side.share, classified(step))
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        for number, parameter in enumerate(model.parameters()):
            gradient = parameter.grad
            assert gradient is not None
            norms.append(float(gradient.norm()))
            if gradient.ndim == 2:
                most = 0.1 * parameter.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
                gradient.mul_((most / gradient.norm(dim=1, keepdim=True)).clamp(max=1.0))
                parameter.grad = gradient - gradient.mean(1, keepdim=True)
            else:
                gradient += 0.01 * drawn(step, *gradient.shape, kind=number)
        optimizer.step()
    assert all(norm < 100 for norm in norms)
    return {}
