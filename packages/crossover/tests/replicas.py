"""A model, its data, and what NumPy makes of replicas that average as the paper says: the recipes' oracle.

Shapes: n replicas, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.topology import Topology
from hocket.transport.peer import Peer

STEPS = 4

#: Where each layer's parameters begin and end among P.
LAYERS = (0, 63, 143, 179)

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def batches(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(5, 6, generator=generator), torch.randint(0, 4, (5,), generator=generator))
        for _ in range(STEPS)
    ]


def train(
    strategy: Any, peer: Peer | None = None, max_norm: float | None = None, joined: int = 1
) -> np.ndarray:
    """Train on this rank; return the parameters, float32 [P].

    Args:
        max_norm: what gradients are clipped to.
        joined: how many batches are concatenated to one.
    """
    model = mlp()
    optimizer = sgd(model)
    peer = peer or hocket.join()
    with hocket.attach(model, optimizer, strategy, peer=peer) as session:
        given = batches(peer.rank)
        for start in session.data(range(0, STEPS, joined)):
            x, y = map(torch.cat, zip(*given[start : start + joined], strict=True))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if max_norm is not None:
                session.clip_grad_norm_(max_norm)
            optimizer.step()
    return flat(model)


def over_processes(peer: Peer, recipe: str, overrides: Sequence[str]) -> list[float]:
    """Train as a rank of a `hocket.testing.job.Job`."""
    torch.set_num_threads(1)
    trained: list[float] = train(hocket.compose(recipe, *overrides), peer).tolist()
    return trained


def averaged(
    size: int,
    topology: Topology,
    *,
    cuts: Sequence[int] = LAYERS,
    delayed: bool = False,
    group: int = 1,
    max_norm: float | None = None,
) -> np.ndarray:
    """Train n = `size` replicas in one process; mix them after each step by W of the round and segment.

    Args:
        size: replicas, of which each steps with the mean gradient of `group` ranks.
        cuts: segment s is the columns from cuts[s] to cuts[s + 1].
        delayed: what a round changes is added after the next step.
        max_norm: what the mean gradients are clipped to.

    Returns:
        float64 [n, P], rounded to float32 where the optimizer stepped.
    """
    models = [mlp() for _ in range(size)]
    optimizers = [sgd(model) for model in models]
    data = [batches(rank) for rank in range(size * group)]
    values = np.stack([flat(model) for model in models]).astype(np.float64)
    late = np.zeros_like(values)
    for step in range(STEPS):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            nn.utils.vector_to_parameters(torch.from_numpy(values[number]).float(), model.parameters())
            members = range(number * group, (number + 1) * group)
            step_with_mean(model, optimizer, [data[rank][step] for rank in members], max_norm)
            values[number] = flat(model)
        values += late
        mixed = values.copy()
        for segment, (start, stop) in enumerate(pairwise(cuts)):
            mixed[:, start:stop] = topology.mixing_matrix(size, step, segment) @ values[:, start:stop]
        late = mixed - values if delayed else late
        values = values if delayed else mixed
    return values + late


def step_with_mean(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Batch], max_norm: float | None
) -> None:
    optimizer.zero_grad()
    for x, y in data:
        (F.cross_entropy(model(x), y) / len(data)).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def on_ranks(size: int, call: Callable[[], np.ndarray]) -> np.ndarray:
    """Run `call` on n = `size` virtual ranks; return what each ends with, [n, P]."""
    return np.stack(hocket.virtual(size).run(call))
