"""Every recipe of every installed plugin trains as its reference says, sends what was planned, and learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from checks import check_bytes, check_learns, check_numbers
from matrix import RANKS, recipes, shorter_periods, sized_recipes
from trial import train_virtually

import hocket
from hocket.strategy import Strategy
from hocket.training.run import load_run

#: A multiple of the intervals and periods of all recipes.
STEPS = 24

#: Another one, of more steps than between any two exchanges of a recipe; for the ranks that are to learn.
LEARNING_STEPS = 48


def shortened(recipe: str) -> Strategy:
    """Compose a recipe, with a shorter period where no training of here reaches the recipe's."""
    return hocket.compose(recipe, *shorter_periods(recipe, STEPS))


def trained() -> list[Any]:
    """Return recipes with numbers of ranks; of three in four, others than the first are the full set's."""
    few = {*recipes()[::4]}
    return [
        pytest.param(name, ranks, marks=[] if ranks == RANKS[0] or name in few else pytest.mark.full)
        for name, ranks in [*((name, 1) for name in recipes()), *sized_recipes()]
    ]


@pytest.mark.parametrize(("recipe", "ranks"), trained())
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


ATLAS = Path(__file__).resolve().parents[1] / "docs" / "atlas"
#: Recipes for late ranks, of which the atlas has none: their costs are of runs with some.
ELSEWHERE = ("eager.majority", "eager.solo")


def test_measured_costs_are_the_atlas_s() -> None:
    """Each cost of a recipe that the atlas has, and the settings that it was trained with."""
    settings = yaml.safe_load((ATLAS / "atlas.yaml").read_text())["tasks"]
    _, characters, fashion = (ATLAS / "README.md").read_text().split("\n## ")
    reached, changed = {}, {}
    for task, text in (("characters", characters), ("fashion_mnist", fashion)):
        reached[task] = dict(re.findall(r"^\| `(\S+)` \| (\d\.\d+) ", text, re.M))
        for group in settings[task]["groups"]:
            for name in group["strategies"]:
                keys = [each.removeprefix("strategy.") for each in group.get("set", [])]
                changed[name] = [each for each in keys if each.startswith("parameters")]
    compared = 0
    for name in recipes():
        run = load_run(name)
        own = (run.loss_percent, run.accuracy_points)
        for task, cost in zip(("characters", "fashion_mnist"), own, strict=True):
            if name not in reached[task] or cost is None or name in ELSEWHERE:
                continue
            value, synchronous = float(reached[task][name]), float(reached[task]["sgd"])
            is_loss = task == "characters"
            found = 100 * (value / synchronous - 1) if is_loss else 100 * (value - synchronous)
            assert cost == pytest.approx(found, abs=0.051), (name, task)
            measured = hocket.compose(name, *run.measured_with)
            assert measured == hocket.compose(name, *changed[name]), name
            compared += 1
    assert compared > 20
