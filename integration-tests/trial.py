"""The training that every cell of the matrix goes through: a small model, and what became of it on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import hocket
from hocket.strategy import Strategy

#: Inputs [samples, 6], classes [samples], and whether the layer `beside` is used, bool [].
Batch = tuple[Tensor, Tensor, Tensor]

_SAMPLES = 8


class Toy(nn.Module):
    """Three layers in a row, and one beside the second that only some batches use: 219 parameters in float64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.beside = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, uses_beside: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        beside = self.beside(hidden) if uses_beside else 0.0
        logits: Tensor = self.last(torch.tanh(self.second(hidden) + beside))
        return logits


def batches(rank: int, count: int) -> list[Batch]:
    """Return a rank's batches of one learnable task; every other one of ranks 1, 4, 7, ... uses the layer beside."""
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = [torch.randn(_SAMPLES, 6, generator=generator, dtype=torch.float64) for _ in range(count)]
    uses_beside = [torch.tensor(rank % 3 == 1 and number % 2 == 0) for number in range(count)]
    return [(x, x[:, :3].argmax(1), uses) for x, uses in zip(inputs, uses_beside, strict=True)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y, uses_beside = batch
    return F.cross_entropy(model(x, bool(uses_beside)), y)


def optimizer_for(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def flat(model: nn.Module) -> NDArray[np.float64]:
    """Copy the parameters into one vector, in the model's order."""
    vector: NDArray[np.float64] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    return vector


@dataclass(frozen=True, eq=False)
class Told:
    """The result of a rank's training.

    Attributes:
        parameters: at the end, float64 [n].
        losses: its batches' losses.
        bytes_sent: as the session counted them.
    """

    parameters: NDArray[np.float64]
    losses: list[float]
    bytes_sent: float


def train(strategy: Strategy | str, steps: int, **attach: Any) -> Told:
    """Train on this rank."""
    rank = hocket.join().rank
    model = Toy()
    optimizer = optimizer_for(model)
    losses = []
    with hocket.attach(model, optimizer, strategy, **attach) as session:
        for batch in session.data(batches(rank, steps)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        session.settle()
        bytes_sent = session.counters.bytes_sent
    return Told(flat(model), losses, bytes_sent)


@dataclass(frozen=True, eq=False)
class Run:
    """The results of virtual ranks' training.

    Attributes:
        parameters: of all ranks, at the end, float64 [ranks, n].
        losses: of all ranks, float64 [ranks, steps].
        counted_bytes: what a rank sent in a step, on average, as the sessions counted it.
        message_bytes: what of it was messages between two ranks, as the transport counted it.
    """

    parameters: NDArray[np.float64]
    losses: NDArray[np.float64]
    counted_bytes: float
    message_bytes: float


def train_virtually(strategy: Strategy | str, ranks: int, steps: int) -> Run:
    """Train on so many virtual ranks."""
    world = hocket.virtual(ranks)
    told = world.run(train, strategy, steps)
    return Run(
        np.stack([of_rank.parameters for of_rank in told]),
        np.array([of_rank.losses for of_rank in told]),
        sum(of_rank.bytes_sent for of_rank in told) / ranks / steps,
        world.num_bytes / ranks / steps,
    )
