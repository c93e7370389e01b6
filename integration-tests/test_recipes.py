"""Every recipe of every installed plugin trains as its reference says, sends what was planned, and learns."""

from __future__ import annotations

import pytest
from checks import check_bytes, check_learns, check_numbers
from matrix import RANKS, recipes, sized_recipes
from trial import train_virtually

import hocket

#: A multiple of the intervals and periods of all recipes.
STEPS = 24

#: More than the longest interval between two exchanges of a recipe.
LEARNING_STEPS = 40


@pytest.mark.parametrize(("recipe", "ranks"), [*((name, 1) for name in recipes()), *sized_recipes()])
def test_numbers_and_bytes(recipe: str, ranks: int) -> None:
    strategy = hocket.compose(recipe)
    run = train_virtually(strategy, ranks, STEPS)
    check_numbers(strategy, run)
    if ranks > 1:
        check_bytes(strategy, ranks, run, rounds=STEPS)


@pytest.mark.parametrize("recipe", recipes())
def test_loss_falls(recipe: str) -> None:
    check_learns(train_virtually(recipe, RANKS[0], LEARNING_STEPS))


@pytest.mark.parametrize("recipe", recipes())
def test_the_trainings_above_reach_every_exchange(recipe: str) -> None:
    assert all(exchange.period(max(RANKS)) < LEARNING_STEPS for exchange in hocket.compose(recipe).exchanges)
