"""torchft's regression task, as a rank trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hocket
from hocket.testing.session import inner_of
from hocket.transport.peer import Peer

STEPS = 15

#: What the digest of the fixtures prints, by delay and blend: the first step, and a layer's weight from there on.
PRINTED: dict[tuple[int, float], dict[int, tuple[int, list[float]]]] = {
    (0, 0.0): {
        0: (0, [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]),
        1: (3, [-5, -7, -9, -23, -25, -27, -29]),
    },
    (0, 0.5): {
        0: (0, [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5]),
        1: (3, [-5, -7, -9, -17, -19, -21, -23]),
    },
    (0, 1.0): {layer: (0, [1, -1, -3, -5, -7, -9, -11, -13, -15, -17]) for layer in (0, 1)},
}


def fixture_strategy(delay: int, local: float) -> dict[str, Any]:
    exchange = {
        "collective": "allreduce",
        "segments": {"name": "fragments", "count": 2},
        "every": 6,
        "stagger": True,
        "delay": delay,
        "offset": -delay,
        "merge": {"name": "blend", "local": local},
        "outer": {"name": "sgd", "lr": 2.0},
    }
    return {"parameters": [exchange]}


def followed(strategy: Any, peer: Peer | None = None) -> tuple[list[list[float]], list[list[float]]]:
    """Return both layers' weights and outer parameters after 0, 1, ... steps."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hocket.attach(model, optimizer, strategy, peer=peer) as session:
        [mix] = inner_of(session).phase.parameters.exchanges

        def look() -> tuple[list[float], list[float]]:
            weights = [float(parameter.detach()) for parameter in model.parameters()]
            return weights, [float(outer.parameters[0]) for outer in mix.outer.values()]

        seen = [look()]
        for _ in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 2.0)
            optimizer.step()
            seen.append(look())
    return [weights for weights, _ in seen], [outer for _, outer in seen]


def followed_over_mpi(peer: Peer, delay: int, local: float) -> Any:
    return followed(fixture_strategy(delay, local), peer)
