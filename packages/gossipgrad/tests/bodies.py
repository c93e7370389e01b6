"""The work of ranks in these tests, on virtual ranks and under mpiexec alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from reference import LEARNING_RATE, MOMENTUM, batch_of, initial
from torch import Tensor, nn

import hocket
from hocket.transport.peer import Peer


def train(peer: Peer, recipe: str, overrides: list[str], steps: int) -> list[Any]:
    """Train the reference's model; return its parameters as nested lists."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), initial(1), strict=True):
            parameter.copy_(torch.from_numpy(values[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    strategy = hocket.compose(recipe, "samples=null", *overrides)
    batches = [tuple(map(torch.from_numpy, batch_of(peer.rank, step))) for step in range(steps)]
    with hocket.attach(model, optimizer, strategy, peer=peer) as session:
        for x, y in session.data(batches):
            optimizer.zero_grad()
            (0.5 * (model(x) - y).square().sum(1).mean()).backward()
            optimizer.step()
    return [parameter.detach().tolist() for parameter in model.parameters()]


def ring_epochs(peer: Peer, counts: list[int], epochs: int) -> list[list[list[int]]]:
    """Train on batches that travel, of which this rank begins with so many; return the samples' numbers by epoch.

    Samples are images of about 100 KB each with their numbers, too large for MPI to send them unasked.
    """
    torch.set_num_threads(1)
    own = [_images(100 * peer.rank + 10 * k, 1 + k % 3) for k in range(counts[peer.rank])]
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[list[list[int]]] = []
    with hocket.attach(model, optimizer, hocket.compose("gossipgrad"), peer=peer) as session:
        for _ in range(epochs):
            seen.append([])
            for batch in session.data(own):
                numbers, image = batch["number"], batch["image"]
                np.testing.assert_array_equal(image[:, 0, 0].numpy(), numbers.numpy().astype(np.float32))
                if session.weight:
                    seen[-1].append(numbers.tolist())
                optimizer.zero_grad()
                model(image[:, 0, :4]).square().mean().backward()
                optimizer.step()
    return seen


def _images(first: int, count: int) -> dict[str, Tensor]:
    numbers = torch.arange(first, first + count)
    return {"number": numbers, "image": numbers.float()[:, None, None].expand(-1, 160, 160).contiguous()}
