"""Layers that are frozen in mid-training under the recipes with outer parameters: on no rank do they move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hocket
from hocket.testing.account import LAYERS, Sums, sample

STEPS, FROM, THAWED = 20, 5, 15

#: Recipes, with overrides.
RECIPES: dict[str, list[str]] = {
    "diloco": ["parameters.0.every=2"],
    "diloco.streaming": ["parameters.0.every=2", "parameters.0.segments.count=2"],
    "diloco.two_level": ["parameters.0.every=2", "gradients.0.over.size=2", "gradients.0.over.by=null"],
    "diloco.sparseloco": ["parameters.0.every=2"],
    "diloco.noloco": ["parameters.0.every=2"],
}


def history_of(recipe: str, overrides: list[str]) -> list[Tensor]:
    """Return this rank's layers after each step, of which the first is frozen from the fifth to the fifteenth."""
    model = Sums().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    with hocket.attach(model, optimizer, hocket.compose(recipe, *overrides)) as session:
        for step in range(STEPS):
            frozen = FROM <= step < THAWED
            model.layers[0].weight.requires_grad_(not frozen)
            optimizer.zero_grad()
            model(sample(step, session.rank).float(), range(int(frozen), LAYERS)).backward()
            optimizer.step()
            history.append(torch.cat([p.detach().clone() for p in model.parameters()]))
    return history


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_frozen_layer_stays_where_it_is(recipe: str) -> None:
    for history in hocket.virtual(4).run(lambda: history_of(recipe, RECIPES[recipe])):
        settled = history[FROM + 3]  # what it had moved before has been sent, and has come
        for later in history[FROM + 4 : THAWED]:
            assert torch.equal(later[0], settled[0])
            assert not torch.equal(later[1], settled[1])
        assert not torch.equal(history[-1][0], settled[0])
