"""A small model in float64 to train, its batches, and the optimizers that users bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Inputs [4, 5], classes [4], and whether the layer `beside` is used.
Batch = tuple[Tensor, Tensor, bool]
Optimizers = list[torch.optim.Optimizer]


class Toy(nn.Module):
    """Two layers in a row, one beside them that not every batch uses, and a buffer that every forward changes."""

    seen: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(5, 6)
            self.beside = nn.Linear(6, 6, bias=False)
            self.last = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(6))
        self.double()

    def forward(self, x: Tensor, uses_beside: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if uses_beside:
            hidden = hidden + torch.tanh(self.beside(hidden))
        with torch.no_grad():
            self.seen.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        logits: Tensor = self.last(hidden)
        return logits


class Around(nn.Module):
    """A module that holds a model, as a task's or a trainer's does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, x: Tensor, uses_beside: bool) -> Tensor:
        logits: Tensor = self.module(x, uses_beside)
        return logits


def batch_of(seed: int, rank: int, number: int, users: frozenset[int]) -> Batch:
    """Return a rank's batch number `number`; ranks among `users` need the layer beside for it."""
    drawn = np.random.default_rng([seed, rank, number])
    return (
        torch.from_numpy(drawn.standard_normal((4, 5))),
        torch.from_numpy(drawn.integers(0, 4, 4)),
        rank in users,
    )


def loss_of(model: nn.Module, batch: Batch, task: int = 0) -> Tensor:
    """Return the loss; that of another `task` has other classes."""
    x, classes, uses_beside = batch
    return F.cross_entropy(model(x, uses_beside), (classes + task) % 4)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is found on the web: `step` sets `p.data`, and steps another optimizer.

    Source: Foret et al. (2021), arXiv:2010.01412, algorithm 1.
    """

    def __init__(self, parameters: list[nn.Parameter], base: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = base
        self.param_groups = base.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups

    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        left = ascend([p for group in self.param_groups for p in group["params"]])
        closure()
        for parameter, data in left:
            parameter.data = data
        self.base.step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Lookahead as it is copied most: without torch's `__init__`, so that only the optimizer that it holds has hooks.

    Source: Zhang et al. (2019), arXiv:1907.08610, algorithm 1.

    Attributes:
        apart: whether somebody else calls `look_ahead` after each step.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.share()
        self.apart = self._is_due = False
        for group in base.param_groups:
            group.setdefault("lookahead_step", 0)

    def share(self) -> None:
        """Have groups and state in common with the optimizer within."""
        self.param_groups, self.state, self.defaults = (
            self.base.param_groups,
            self.base.state,
            self.base.defaults,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self._is_due = True
        if not self.apart:
            self.look_ahead()
        return loss

    @torch.no_grad()
    def look_ahead(self) -> None:
        """Take the slow weights half of the way in every second step, and go on from there."""
        for group in self.base.param_groups if self._is_due else ():
            group["lookahead_step"] += 1
            for fast in group["params"] if group["lookahead_step"] % 2 == 0 else ():
                state = self.base.state[fast]
                if "slow" not in state:
                    state["slow"] = fast.detach().clone()
                fast.copy_(state["slow"].add_(fast - state["slow"], alpha=0.5))
        self._is_due = False


class Holder:
    """A plain class that holds an optimizer and lowers its rate, as warm-ups of tutorials do; nobody attaches it."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.steps)
        self.base.step()


def within(optimizer: Any) -> Any:
    """Return what is attached of an optimizer: what a plain class holds."""
    return optimizer.base if isinstance(optimizer, Holder) else optimizer


@torch.no_grad()
def ascend(parameters: list[nn.Parameter], rho: float = 0.05) -> list[tuple[nn.Parameter, Tensor]]:
    """Go `rho` uphill, by other tensors in place of the parameters' own; return these."""
    having = [(p, p.grad) for p in parameters if p.grad is not None]
    norm = torch.stack([gradient.norm() for _, gradient in having]).norm() if having else torch.ones(())
    left = []
    for parameter, gradient in having:
        left.append((parameter, parameter.data))
        parameter.data = parameter.data + gradient * (rho / (norm + 1e-12))
    return left


def hook_on(model: nn.Module, layer: str, by: float) -> None:
    """Have the gradient of a layer's weight multiplied."""
    weight: Tensor = model.get_submodule(layer).weight  # type: ignore[assignment]
    weight.register_hook(lambda gradient: by * gradient)


@torch.no_grad()
def mask_of(then: str | None, model: Toy) -> None:
    """Do with the weights what users do after a step: mask some, as pruning does, or clamp all."""
    if then == "mask":
        model.last.weight[:, ::2] = 0
    elif then == "clamp":
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def _lbfgs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        parameters, lr=0.1, max_iter=2, history_size=1, tolerance_change=0.0, tolerance_grad=0.0
    )


#: By name, from a model to its optimizers.
OPTIMIZERS: dict[str, Callable[[Toy], Optimizers]] = {
    "sgd": lambda model: [_sgd(list(model.parameters()))],
    "adamw": lambda model: [_adamw(list(model.parameters()))],
    "lbfgs": lambda model: [_lbfgs(list(model.parameters()))],
    "sam": lambda model: [Sam(list(model.parameters()), _sgd(list(model.parameters())))],
    "lookahead": lambda model: [Lookahead(_sgd(list(model.parameters())))],
    "holder": lambda model: [Holder(_sgd(list(model.parameters())))],  # type: ignore[list-item]
    "two": lambda model: [
        _sgd([*model.first.parameters(), *model.beside.parameters()]),
        _adamw(list(model.last.parameters())),
    ],
}


def optimizers_for(name: str, model: Toy) -> Optimizers:
    return OPTIMIZERS[name](model)
