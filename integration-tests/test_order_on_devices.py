"""Ranks begin the operations of device lanes in one order, with every recipe that such lanes accept."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from matrix import recipes, shorter_periods
from torch import Tensor, nn

import hocket
from hocket.errors import AttachError, CompositionError
from hocket.strategy import Strategy
from hocket.testing.ordered import Begun, OrderedHost, in_one_order

STEPS = 9


class Branches(nn.Module):
    """Layers that each rank calls in an order of its own, so that gradients are complete in different orders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.branches[number](x).tanh()
        y: Tensor = self.last(x)
        return y


def train(strategy: Strategy, begun: Begun | None) -> list[float]:
    """Return what this rank has trained; its lanes are the host's where nothing is noted."""
    rank = hocket.join().rank
    peer = hocket.join() if begun is None else OrderedHost(hocket.join(), begun)
    model, drawing = Branches(), np.random.default_rng(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    lanes: Literal["host", "gloo"] = "host" if begun is None else "gloo"
    with hocket.attach(model, optimizer, strategy, peer=peer, lanes=lanes) as session:
        for _ in range(STEPS):
            order = drawing.permutation(4)[: drawing.integers(1, 5)].tolist()
            optimizer.zero_grad()
            model(torch.from_numpy(drawing.standard_normal((3, 4))).float(), order).square().mean().backward()
            optimizer.step()
        with session.consensus():
            pass
        session.settle()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def strategies(recipe: str, ranks: int) -> list[Strategy]:
    """Return the recipe as it is and in segments of layers, also where the first ranks of groups lead in turn."""
    short = shorter_periods(recipe, STEPS - 1)
    plain = hocket.compose(recipe, *short)
    layers = [f"{exchange.name}.segments=layers" for exchange in plain.exchanges]
    groups = [
        f"{exchange.name}.over={{name: {name}, size: 2, by: null, count: null, sharded: {sharded}}}"
        for sharded in ("true", "false")
        for exchange in plain.exchanges
        if (name := type(exchange.over).__name__.lower()) in ("group", "leaders")
    ]
    half = len(groups) // 2
    found = []
    for overrides in ([], layers, [*layers, *groups[:half]], [*layers, *groups[half:]]):
        try:
            strategy = hocket.compose(recipe, *short, *overrides)
        except CompositionError:
            continue  # what the recipe says depends on its segments
        if strategy not in found:
            found.append(strategy)
    return found


@pytest.mark.one_of_each
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("recipe", recipes())
def test_ranks_begin_the_same_one_after_the_other(recipe: str, ranks: int) -> None:
    for strategy in strategies(recipe, ranks):
        begun: Begun = {}
        try:
            found = hocket.virtual(ranks).run(train, strategy, begun)
        except (AttachError, CompositionError):
            continue  # not carried by such lanes, or not defined for so many ranks
        assert in_one_order(begun)
        assert found == hocket.virtual(ranks).run(train, strategy, None)
