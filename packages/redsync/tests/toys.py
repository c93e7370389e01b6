"""A small model, data, and what a single process makes of them; float64, so a mistake is not taken for rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket

RANKS, STEPS = 3, 8


class Plain(TypedDict):
    """Fields of every compressor of this package."""

    dense_below_kb: float
    correct_momentum: bool


PLAIN: Plain = {"dense_below_kb": 0.0, "correct_momentum": False}

T = TypeVar("T")


def on_ranks(size: int, call: Callable[[int], T]) -> list[T]:
    """Run `call(rank)` on `size` virtual ranks."""
    return hocket.virtual(size).run(lambda: call(hocket.join().rank))


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def sgd(model: nn.Module, momentum: float = 0.9, nesterov: bool = False) -> torch.optim.SGD:
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01, nesterov=nesterov and momentum > 0
    )


def batches(rank: int, count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(4, 6, generator=generator).double(), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]


def flat(model: nn.Module) -> Tensor:
    """Copy the parameters into one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def train(strategy: Any, rank: int, momentum: float = 0.9, nesterov: bool = False) -> Tensor:
    """Run the plain loop on this rank; return the parameters."""
    model = model_of()
    optimizer = sgd(model, momentum, nesterov)
    with hocket.attach(model, optimizer, strategy) as session:
        for batch in session.data(batches(rank)):
            step(model, optimizer, batch)
    return flat(model)


def trained(strategy: Any, ranks: int = RANKS, **options: Any) -> Tensor:
    """Train on virtual ranks, which must end equal; return the parameters."""
    ended = on_ranks(ranks, lambda rank: train(strategy, rank, **options))
    for own in ended[1:]:
        assert torch.equal(own, ended[0])
    return ended[0]


def dense(momentum: float = 0.9, nesterov: bool = False, ranks: int = RANKS) -> Tensor:
    """Train one model in one process with the mean of all ranks' gradients."""
    model = model_of()
    optimizer = sgd(model, momentum, nesterov)
    data: Sequence[Sequence[tuple[Tensor, Tensor]]] = [batches(rank) for rank in range(ranks)]
    for number in range(STEPS):
        optimizer.zero_grad()
        for own in data:
            x, y = own[number]
            (F.cross_entropy(model(x), y) / ranks).backward()
        optimizer.step()
    return flat(model)
