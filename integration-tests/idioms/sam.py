"""SAM as its most copied class has it: two backwards, of which the first moves the weights uphill."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from idioms.batches import classified, mlp
from idioms.side import Side, Told

#: The gradient is read between backward and step.
EDITS = True


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021)."""

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **settings: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        having = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in having if p.grad is not None]).norm()
        for p in having:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Tensor | None:  # type: ignore[override]
        raise NotImplementedError("first_step and second_step")


def train(side: Side) -> Told:
    model = mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    side.attach(model, optimizer.base_optimizer)
    for step in side.steps(5):
        x, y = map(side.share, classified(step))
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()
    return {}
