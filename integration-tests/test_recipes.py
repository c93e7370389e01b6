"""Every recipe of every installed plugin trains as its reference says, learns, and keeps to its description."""

from __future__ import annotations

import pytest
from checks import check_learns, check_numbers
from matrix import RANKS, recipes, sized_recipes
from trial import train_virtually

import hocket

STEPS = 10

#: More than the longest interval between two exchanges of a recipe.
LEARNING_STEPS = 40


@pytest.mark.parametrize(("recipe", "ranks"), [*((name, 1) for name in recipes()), *sized_recipes()])
def test_numbers(recipe: str, ranks: int) -> None:
    check_numbers(hocket.compose(recipe), train_virtually(recipe, ranks, STEPS))


@pytest.mark.parametrize("recipe", recipes())
def test_loss_falls(recipe: str) -> None:
    check_learns(train_virtually(recipe, RANKS[0], LEARNING_STEPS))


@pytest.mark.parametrize("recipe", recipes())
def test_the_trainings_above_reach_every_exchange(recipe: str) -> None:
    assert all(exchange.period(max(RANKS)) < LEARNING_STEPS for exchange in hocket.compose(recipe).exchanges)
