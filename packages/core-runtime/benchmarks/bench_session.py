"""The time that a session of one rank adds to a step: five layers of 1 M parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hocket

WIDTH, LAYERS, SAMPLES = 1024, 5, 8
STRATEGIES = [None, "sgd", "agd", "dpsgd", "overlap_sgp"]


@contextmanager
def attached(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str | None) -> Iterator[None]:
    if strategy is None:
        yield
        return
    with hocket.attach(model, optimizer, strategy):
        yield


@pytest.mark.benchmark(group="a step on one rank")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy or "no session")
def bench_step(benchmark: Any, strategy: str | None) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    inputs = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with attached(model, optimizer, strategy):
        benchmark.pedantic(step, rounds=51, warmup_rounds=5)
