"""A plan promises of every recipe what its sessions do: the mean of the bytes sent, the buffers of a rank.

The recipes come from the registry, so that a new one is tested as soon as it is registered.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.plan.plan import Plan, plan
from hocket.plugin import CORE, default_registry
from hocket.testing.memory import held_bytes, reachable_bytes
from hocket.transport.network import NetworkModel

RECIPES = [recipe.name for recipe in default_registry().recipes() if recipe.plugin == CORE]

#: A multiple of the periods of all recipes' rounds: 8 steps, and log2 of 4 and of 6 ranks.
STEPS = 24


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 10))


def planned(recipe: str, ranks: int) -> Plan:
    return plan(hocket.compose(recipe), model(), ranks, NetworkModel())


def train(recipe: str) -> tuple[float, int]:
    """Train on this rank; return the bytes sent in a step, and those of the exchanges' buffers."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with hocket.attach(net, optimizer, recipe) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.ones(4, 60)).square().mean().backward()
            optimizer.step()
        session.settle()
        return session.counters.bytes_sent / STEPS, held_bytes(session)


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_and_memory(recipe: str, ranks: int) -> None:
    expected = planned(recipe, ranks)
    told = hocket.virtual(ranks).run(train, recipe)
    assert sum(sent for sent, _ in told) / ranks == pytest.approx(expected.bytes_per_step, rel=1e-9)
    assert max(held for _, held in told) == pytest.approx(expected.memory_bytes, rel=0.1)


def test_memory_is_counted_once_and_wherever_it_is() -> None:
    buffer, array = torch.zeros(1000), np.zeros(100)
    things = {"views": [buffer[:10], buffer.numpy()[5:]], "call": lambda: array[50:]}
    assert reachable_bytes(things) == 4000 + 800
    assert reachable_bytes(things, without=[buffer]) == 800
