"""Gradients whose memory a loop replaces: pruning by `p.grad.data = ...`, models converted and back, `detach_`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import Batch, batches, flat, mlp, on_ranks

import hocket

STRATEGIES = ("sgd", "agd", "hierarchical_sgd", "dpsgd")


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 0.5


def convert(model: nn.Module) -> None:
    model.float()
    model.double()


def detach(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.detach_()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    edit: Callable[[nn.Module], None],
) -> Tensor:
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        for _ in range(1 + number % 2):  # every other step adds up two backwards, the first one's edited
            F.cross_entropy(model(x), y).backward()
            edit(model)
        optimizer.step()
    return flat(model)


@pytest.mark.one_of_each
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("edit", [halve, convert, detach])
def test_the_next_gradients_are_the_next_ones(strategy: str, edit: Callable[[nn.Module], None]) -> None:
    """Ranks with the same batches are one process."""

    def run(_: int) -> Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with hocket.attach(model, optimizer, strategy):
            return train(model, optimizer, batches(0, 5), edit)

    model = mlp()
    expected = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches(0, 5), edit)
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # converted values were rounded
