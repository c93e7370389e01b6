"""Training programs as people write them (`idioms/`), with and without Hocket.

Where ranks step with the mean gradient of the whole batch, each has the numbers of one process in plain torch.
With every other recipe numbers are finite, steps are counted as the optimizer makes them, what is frozen stays, a
consensus leaves one model on all ranks, one rank alone trains as without Hocket, and a resumed run goes on bit for bit.

A program that needs a package of `tools/full_requirements.txt` is skipped where that is missing. Each is run with some
strategies, the same in every run, and with all of them in the full set.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from idioms.corpus import (
    EXACT,
    RECIPES,
    changes_alone,
    difference,
    drawn_for,
    ends_alone,
    has_exact,
    is_deterministic,
    is_finite,
    keeps_frozen,
    missing,
    names,
    perform,
    skipped,
    strategy,
)
from idioms.side import Ended

IS_FULL = os.environ.get("HOCKET_CELLS") == "all"
STOP = 3

#: What LBFGS is told where ranks would decide differently how often to call its closure.
REFUSAL = "closure"

#: What is said of a rank that leaves a batch out by itself, which no program here does.
FALSE_ALARM = "without optimizer.step()"


def ways(of: list[str], count: int, ranks: tuple[int, ...]) -> list[tuple[str, str, int]]:
    drawn = [(name, drawn_for(name, of, 0 if IS_FULL else count, ranks)) for name in names()]
    return [(name, chosen, size) for name, pairs in drawn for chosen, size in pairs]


def performed(
    name: str, chosen: str, ranks: int, folder: Path | None = None, stops: int | None = None
) -> list[Ended]:
    if missing(name):
        pytest.skip(f"needs {', '.join(missing(name))}")
    ended = perform(name, chosen, ranks, folder, stops)
    if isinstance(ended, str):
        assert REFUSAL in ended, ended
        pytest.skip(ended)
    return ended


@pytest.mark.parametrize(("name", "chosen", "ranks"), ways(list(EXACT), 1, (1, 2, 3)))
def test_one_process_with_the_whole_batch_has_the_same_numbers(
    name: str, chosen: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    if not missing(name) and not has_exact(name, chosen):
        ranks = 1
    for ended in performed(name, chosen, ranks):
        assert difference(ended.told, ends_alone(name).told) < 1e-9
        check_invariants(ended, name, chosen)
    assert not [line for line in caplog.messages if FALSE_ALARM in line]


@pytest.mark.parametrize(("name", "chosen", "ranks"), ways(RECIPES, 1, (2, 3)))
def test_recipes_keep_what_every_recipe_keeps(name: str, chosen: str, ranks: int) -> None:
    first, *others = performed(name, chosen, ranks)
    check_invariants(first, name, chosen)
    for ended in others:
        check_invariants(ended, name, chosen)
        assert all(torch.equal(first.agreed[key], value) for key, value in ended.agreed.items())
        assert ended.steps == first.steps


def check_invariants(ended: Ended, name: str, chosen: str) -> None:
    assert is_finite(ended.told)
    assert is_finite(ended.agreed)
    assert all(steps == of_optimizer + skipped(name) for steps, of_optimizer in ended.steps)
    if keeps_frozen(chosen):
        assert not ended.moved


@pytest.mark.parametrize(
    ("name", "chosen", "ranks"), ways([each for each in RECIPES if not changes_alone(each)], 1, (1,))
)
def test_one_rank_alone_trains_as_without_hocket(name: str, chosen: str, ranks: int) -> None:
    [ended] = performed(name, chosen, ranks)
    assert difference(ended.told, ends_alone(name).told) < 1e-12


@pytest.mark.parametrize(
    ("name", "chosen", "ranks"), ways([each for each in RECIPES if is_deterministic(each)], 1, (2, 3))
)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, chosen: str, ranks: int, tmp_path: Path) -> None:
    whole = performed(name, chosen, ranks)
    performed(name, chosen, ranks, tmp_path, STOP)
    for expected, found in zip(whole, performed(name, chosen, ranks, tmp_path), strict=True):
        assert found.steps == expected.steps
        assert found.told.keys() == expected.told.keys()
        assert all(torch.equal(found.told[key], value) for key, value in expected.told.items())


def test_strategies_that_are_drawn_are_all_there() -> None:
    assert {strategy(each).name for each in RECIPES} == set(RECIPES)
    assert len(names()) >= 30
