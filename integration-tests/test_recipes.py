"""Every recipe of every installed plugin trains as its reference says, sends what was planned, and learns."""

from __future__ import annotations

import pytest
from checks import check_bytes, check_learns, check_numbers
from matrix import RANKS, recipes, shorter_periods, sized_recipes
from trial import train_virtually

import hocket
from hocket.strategy import Strategy

#: A multiple of the intervals and periods of all recipes.
STEPS = 24

#: Another one, of more steps than between any two exchanges of a recipe; for the ranks that are to learn.
LEARNING_STEPS = 48


def shortened(recipe: str) -> Strategy:
    """Compose a recipe, with a shorter period where no training of here reaches the recipe's."""
    return hocket.compose(recipe, *shorter_periods(recipe, STEPS))


@pytest.mark.parametrize(("recipe", "ranks"), [*((name, 1) for name in recipes()), *sized_recipes()])
def test_numbers_bytes_and_loss(recipe: str, ranks: int) -> None:
    strategy = shortened(recipe)
    steps = LEARNING_STEPS if ranks == RANKS[0] else STEPS
    run = train_virtually(strategy, ranks, steps)
    check_numbers(strategy, run)
    if ranks > 1:
        check_bytes(strategy, ranks, run, rounds=steps)
    if ranks == RANKS[0]:
        check_learns(strategy, run)


def test_every_recipe_is_defined_for_the_ranks_that_are_to_learn() -> None:
    assert {name for name, ranks in sized_recipes() if ranks == RANKS[0]} == set(recipes())


@pytest.mark.parametrize("recipe", recipes())
def test_the_trainings_above_reach_every_exchange(recipe: str) -> None:
    assert all(exchange.period(max(RANKS)) < LEARNING_STEPS for exchange in shortened(recipe).exchanges)
