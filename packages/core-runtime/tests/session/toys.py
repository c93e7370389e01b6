"""Small models and data, and what a single process makes of them: the oracles of the session's tests.

Everything is float64, so that another order of summation shows in the 15th digit, and a mistake in the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]

GRADIENT_STRATEGIES = (
    ("sgd",),
    ("sgd", "gradients.0.segments=layers"),
    ("agd", "gradients.0.segments=layers"),
    ("agd", "gradients.0.segments={name: bytes, size_mb: 0.001, first_mb: 0.0002}"),
)


def on_ranks(size: int, call: Callable[[int], T]) -> list[T]:
    """Run `call(rank)` on `size` virtual ranks."""
    return hocket.virtual(size).run(lambda: call(hocket.join().rank))


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)


def batches(rank: int, count: int, samples: int = 4, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (
            torch.randn(samples, 5, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (samples,), generator=generator),
        )
        for _ in range(count)
    ]


def flat(model: nn.Module) -> Tensor:
    """Copy the parameters into one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def gradient_of(model: nn.Module, batch: Batch) -> list[Tensor]:
    x, y = batch
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


def step_with(
    model: nn.Module, optimizer: torch.optim.Optimizer, weighted: Sequence[tuple[Batch, float]]
) -> None:
    """Step with the weighted mean of the batches' gradients; not at all where there is none."""
    if not weighted:
        return
    total = sum(weight for _, weight in weighted)
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for batch, weight in weighted:
        for summed, gradient in zip(sums, gradient_of(model, batch), strict=True):
            summed.add_(weight / total * gradient)
    for parameter, summed in zip(parameters, sums, strict=True):
        parameter.grad = summed
    optimizer.step()


def reference(steps: Sequence[Sequence[tuple[Batch, float]]], momentum: float = 0.9) -> Tensor:
    """Train one model in one process; each step has the batches, with weights, that all ranks put into it."""
    model = mlp()
    optimizer = sgd(model, momentum)
    for weighted in steps:
        step_with(model, optimizer, weighted)
    return flat(model)


def replicas(
    data: Sequence[Sequence[Batch | None]], every: int | None, initial: Sequence[int] | None = None
) -> list[Tensor]:
    """Train a replica for each rank in one process, averaged after each `every` steps.

    Args:
        data: for each rank its batches, all as many; None where a rank makes no step.
        every: None for never.
        initial: each replica's seed; all 0 if None.
    """
    models = [mlp(seed) for seed in (initial or [0] * len(data))]
    optimizers = [sgd(model) for model in models]
    for number, of_ranks in enumerate(zip(*data, strict=True), start=1):
        for model, optimizer, batch in zip(models, optimizers, of_ranks, strict=True):
            step_with(model, optimizer, [] if batch is None else [(batch, 1.0)])
        if every and number % every == 0:
            mean = torch.stack([flat(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return [flat(model) for model in models]


def train(
    strategy: Sequence[Any],
    loader: Any,
    *,
    momentum: float = 0.9,
    seed: int = 0,
    attach: dict[str, Any] | None = None,
    **data: Any,
) -> Tensor:
    """Run the plain loop on this rank; return the parameters."""
    model = mlp(seed)
    optimizer = sgd(model, momentum)
    with hocket.attach(model, optimizer, hocket.compose(*strategy), **(attach or {})) as session:
        for x, y in session.data(loader, **data):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return flat(model)
