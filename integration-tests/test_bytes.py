"""What `plan` predicts is what sessions count, and what they count is what the transport carries.

Virtual ranks carry out the transport's own collectives without messages, so the second is seen where exchanges are
made of messages: gossip, and the allreduces that are schedules.
"""

from __future__ import annotations

from itertools import product

import pytest
from checks import STEPS, trained
from matrix import Cell, accepted, is_repeatable, sized_recipes
from trial import Toy, train_virtually

import hocket
from hocket.collective.allreduce import Algorithm, Allreduce
from hocket.plan.plan import plan
from hocket.strategy import Exchange, Strategy
from hocket.transport.network import NetworkModel

CELLS = [
    (cell, ranks)
    for slot in ("gradients", "parameters")
    for cell, ranks in accepted(slot)
    if is_repeatable(cell.compose())
]
RECIPES = [(recipe, ranks) for recipe, ranks in sized_recipes() if is_repeatable(hocket.compose(recipe))]

#: A multiple of the intervals and periods of all recipes.
RECIPE_STEPS = 24


def predicted(strategy: Strategy, ranks: int) -> float:
    return plan(strategy, Toy(), ranks, NetworkModel()).bytes_per_step


def check_planned(strategy: Strategy, ranks: int, counted_bytes: float) -> None:
    """Compare: to rounding, or, where a message's length is known on average only, within its bounds."""
    equal_sizes = all(exchange.compressor.equal_sizes for exchange in strategy.exchanges)
    assert counted_bytes == pytest.approx(predicted(strategy, ranks), rel=1e-9 if equal_sizes else 0.5)


def is_made_of_messages(exchange: Exchange, ranks: int) -> bool:
    """Return whether ranks send each other messages, as many in each round, and all that are counted."""
    if isinstance(exchange.collective, Allreduce):
        return exchange.collective.algorithm is not Algorithm.NATIVE
    if exchange.topology is None:
        return False
    degrees = {
        len(exchange.topology.neighbours(rank, ranks, round, segment).send_to)
        for rank, round, segment in product(range(ranks), range(STEPS), range(4))
    }
    return len(degrees) == 1


def carried(cells: list[tuple[Cell, int]]) -> list[tuple[Cell, int]]:
    """Return the cells of which every exchange is made of messages."""
    over_world = ((cell, ranks) for cell, ranks in cells if "-world" in cell.id)
    return [(c, n) for c, n in over_world if all(is_made_of_messages(e, n) for e in c.compose().exchanges)]


def with_ids(cells: list[tuple[Cell, int]]) -> list[object]:
    return [pytest.param(cell, ranks, id=f"{cell.id}-{ranks}") for cell, ranks in cells]


@pytest.mark.parametrize(("recipe", "ranks"), RECIPES)
def test_recipes_send_what_was_planned(recipe: str, ranks: int) -> None:
    run = train_virtually(recipe, ranks, RECIPE_STEPS)
    check_planned(hocket.compose(recipe), ranks, run.counted_bytes)


@pytest.mark.parametrize(("cell", "ranks"), with_ids(CELLS))
def test_cells_send_what_was_planned(cell: Cell, ranks: int) -> None:
    check_planned(cell.compose(), ranks, trained(cell, ranks).counted_bytes)


@pytest.mark.parametrize(("cell", "ranks"), with_ids(carried(CELLS)))
def test_what_is_counted_is_carried(cell: Cell, ranks: int) -> None:
    run = trained(cell, ranks)
    assert run.message_bytes == pytest.approx(run.counted_bytes, rel=1e-9)
