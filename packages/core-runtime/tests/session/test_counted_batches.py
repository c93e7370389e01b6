"""What a rank's batches have counted, by which statistics are averaged: those that were trained with, all of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_branches import BRANCHES, composed
from torch import Tensor, nn
from toys import batches, on_ranks

import hocket


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def means(model: nn.Module) -> Tensor:
    return model.get_buffer("1.running_mean").clone()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    x, y = batches(rank, number + 1)[number]
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def averaged_by(counts: list[float], told: list[tuple[Tensor, Tensor]]) -> None:
    """Compare what a consensus has made of two ranks' means with what their counts make of them."""
    (one, mean), (other, same) = told
    expected = (counts[0] * one + counts[1] * other) / sum(counts)
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(same, expected)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_batch_that_is_left_out_counts_no_samples(branch: str) -> None:
    # Rank 1 has batches of weights 1 to 5, and leaves out 3 and 4; what it repeats in place of a sixth counts nothing.
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        with hocket.attach(model, optimizer, composed(branch)) as session:
            for number, _ in enumerate(session.data(batches(rank, 6 - rank), weight=lambda _: next(weights))):
                if (rank, number) not in ((1, 2), (1, 3)):
                    step(model, optimizer, rank, number)
            own = means(model)
            session.consensus()
            return own, means(model)

    averaged_by([21.0, 8.0], on_ranks(2, run))


@pytest.mark.parametrize("where", ["outside", "after an accumulation", "several optimizers"])
def test_a_step_outside_of_session_data_counts_as_a_batch(where: str) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = normed()
        parameters = list(model.parameters())
        halves = [parameters[:2], parameters[2:]] if where == "several optimizers" else [parameters]
        optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]
        with hocket.attach(model, optimizers, "local") as session:
            if where == "after an accumulation":
                for x, y in session.data(batches(rank, 2)):
                    with session.accumulate():
                        F.cross_entropy(model(x), y).backward()
                optimizers[0].step()  # of the batches of the loop
            for number in range(1 + 2 * rank):
                x, y = batches(rank, number + 1)[number]
                F.cross_entropy(model(x), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            own = means(model)
            session.consensus()
            return own, means(model)

    more = 2.0 if where == "after an accumulation" else 0.0
    averaged_by([1 + more, 3 + more], on_ranks(2, run))
