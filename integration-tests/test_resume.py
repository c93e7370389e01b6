"""A run that is saved, ended and resumed gives the bits of one that never was: recipes, states, changes of phase."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import Cell, accepted, full_but, is_repeatable, recipes
from trial import Toy, batches, flat, loss_of, optimizer_for

import hocket
from hocket.strategy import Strategy

RANKS = 4
STEPS = 10

#: Whose runs give the same bits when nothing interrupts them.
REPEATABLE = [recipe for recipe in recipes() if is_repeatable(hocket.compose(recipe))]

#: The step after which one recipe follows another.
PHASE = 5


def run(
    strategy: Strategy,
    save: Path | None = None,
    after: Sequence[int] = (),
    load: Path | None = None,
    steps: int = STEPS,
) -> list[tuple[bytes, ...]]:
    """Train, save after some steps, end with the last of them, or continue from there; return what every rank has.

    All of it is returned bit for bit.
    """

    def train() -> tuple[bytes, ...]:
        # What a resumed process begins with must not matter.
        model = Toy(seed=0 if load is None else 7)
        optimizer = optimizer_for(model)
        losses = []
        with hocket.attach(model, optimizer, strategy) as session:
            if load is not None:
                session.load(load)
            for batch in session.data(batches(session.rank, steps)):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if save is not None and session.step in after:
                    session.save(save / str(session.step))
                    if session.step == after[-1]:
                        break
        momenta = [
            v.numpy() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)
        ]
        return (
            flat(model).tobytes(),
            *(momentum.tobytes() for momentum in momenta),
            np.array(losses[-1:]).tobytes(),
            str(session.counters.bytes_sent).encode(),
        )

    return hocket.virtual(RANKS).run(train)


def check(strategy: Strategy, folder: Path, *after: int, steps: int = STEPS) -> None:
    """Go on from what was saved after each step, the last of which ended that run; compare with one that never was."""
    uninterrupted = run(strategy, steps=steps)
    run(strategy, folder, after, steps=steps)
    for step in after:
        found = run(strategy, load=folder / str(step), steps=steps)
        assert found == uninterrupted, f"resumed after step {step}"


def in_phases(first: str, second: str) -> Strategy:
    """Return one recipe followed by another."""
    before, after = (hocket.compose(name).resolved() for name in (first, second))
    slots = {slot: after[slot] for slot in ("gradients", "parameters")}
    return hocket.compose({**before, "phases": {str(PHASE): slots}})


def with_states() -> list[Any]:
    """Return the cells of gradients over the world: with every compressor in the full set, otherwise each word once."""
    chosen = [cell for cell, ranks in accepted("gradients") if ranks == RANKS and is_sparse(cell)]
    found, met = [], set[str]()
    for cell in sorted(chosen, key=lambda cell: -cell.id.count("+")):
        words = {*cell.id.replace("+", "-").split("-")}
        found.append(pytest.param(cell, id=cell.id, marks=[] if words - met else pytest.mark.full))
        met |= words
    return found


def is_sparse(cell: Cell) -> bool:
    return cell.id.startswith("gradients-sparse_allreduce-") and cell.id.endswith("-world")


# Of the others, a pair of `test_phases` saves and resumes each before and after a change.
@pytest.mark.parametrize("recipe", full_but(REPEATABLE, 3))
def test_recipes(recipe: str, tmp_path: Path) -> None:
    check(hocket.compose(recipe), tmp_path, 3, 9)


@pytest.mark.parametrize("cell", with_states())
def test_compressors(cell: Cell, tmp_path: Path) -> None:
    check(cell.compose(), tmp_path, 3, steps=6)


def phases() -> list[Any]:
    """Return pairs of recipes: with the full set each is followed by the next, otherwise each is in one pair."""
    pairs = list(pairwise([*REPEATABLE, REPEATABLE[0]]))
    few = pairs[::2]
    return [pytest.param(*pair, marks=[] if pair in few else pytest.mark.full) for pair in pairs]


@pytest.mark.parametrize(("first", "second"), phases())
def test_phases(first: str, second: str, tmp_path: Path) -> None:
    check(in_phases(first, second), tmp_path, PHASE - 2, PHASE + 2)


@pytest.mark.parametrize("recipe", full_but(recipes(), 2))
def test_replicas_are_equal_after_a_change_to_what_keeps_them_so(recipe: str) -> None:
    ended = run(in_phases(recipe, "sgd"))
    assert len({parameters for parameters, *_ in ended}) == 1
