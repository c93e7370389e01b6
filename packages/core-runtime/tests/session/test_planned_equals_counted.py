"""A plan promises of every recipe what its sessions do: the mean of the bytes sent, the buffers of a rank.

The recipes come from the registry, so that a new one is tested as soon as it is registered.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.plan.plan import Plan, plan
from hocket.plugin import CORE, default_registry
from hocket.testing.session import inner_of
from hocket.transport.network import NetworkModel

RECIPES = [recipe.name for recipe in default_registry().recipes() if recipe.plugin == CORE]

#: A multiple of the periods of all recipes' rounds: 8 steps, and log2 of 4 and of 6 ranks.
STEPS = 24

#: What no buffer of an exchange lies behind: the user's own, and the transport, through which all ranks are reached.
_NOT_FOLLOWED = (types.ModuleType, type, nn.Module, torch.optim.Optimizer, hocket.Session)


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
        sent = session.counters.bytes_sent / STEPS
        return sent, reachable_bytes(inner_of(session).phase.opened, without=inner_of(session).storage.flats)


def reachable_bytes(roots: Any, without: Sequence[Tensor] = ()) -> int:
    """Return the bytes of all tensors and arrays that are reached from `roots`, each piece of memory once.

    Args:
        roots: where to begin.
        without: their memory does not count.
    """
    seen: set[int] = set()
    memory: dict[int, int] = {}
    queue = [roots, *without]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, _NOT_FOLLOWED) or _is_transport(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, np.ndarray):
            while isinstance(thing.base, np.ndarray):
                thing = thing.base
            memory.setdefault(thing.ctypes.data, thing.nbytes)
        elif isinstance(thing, types.FunctionType):
            queue += [thing.__closure__, thing.__defaults__]  # not its module's globals
        else:
            queue += gc.get_referents(thing)
    counted, end = 0, 0
    for start, nbytes in sorted(memory.items()):
        counted += max(0, start + nbytes - max(start, end))  # an array may be a view of a tensor's memory
        end = max(end, start + nbytes)
    return counted - sum(tensor.untyped_storage().nbytes() for tensor in without)


def _is_transport(thing: Any) -> bool:
    return type(thing).__module__.startswith("hocket.transport.")


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
