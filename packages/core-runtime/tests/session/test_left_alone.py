"""An error that one rank catches and goes on from: the others hear of it, and later sessions begin together."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import DisagreementError, SessionLeftError

LONGEST_S = 150.0
NUM_TRIALS, NUM_STEPS = 3, 5
# Each has its own way to wait: for neighbours, for what is under way, for a host.
RECIPES = ["dpsgd", "overlap_sgp", "hierarchical_sgd"]


class OutOfMemoryError(Exception):
    """Raised on one rank, as where its batch is the longest."""


def trial(number: int, recipe: str) -> list[float]:
    """Train a model of the trial's own on a batch of the rank's own; on rank 1 the first trial fails in mid-step."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, float(number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hocket.attach(model, optimizer, recipe) as session:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + session.rank)).sum().backward()
            if (number, session.rank, step) == (0, 1, 2):
                raise OutOfMemoryError("on this rank only")
            optimizer.step()
    return model.weight.flatten().tolist()


def search(recipe: str = "sgd") -> list[str | list[float]]:
    """Return what came of each trial: the weights, or the error's name and words."""
    found: list[str | list[float]] = []
    for number in range(NUM_TRIALS):
        try:
            found.append(trial(number, recipe))
        except (OutOfMemoryError, SessionLeftError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def alone(number: int, ranks: int) -> list[float]:
    """Return the weights after the same trial in one process: every step goes along the ranks' mean gradient."""
    mean = sum(2.0 * (1 + rank) for rank in range(ranks)) / ranks
    return [number - NUM_STEPS * 0.01 * mean] * 4


def check_search(found: list[list[str | list[float]]]) -> None:
    """Check that the others hear of rank 1's error, and that each later trial has one outcome, that of one process."""
    ranks = len(found)
    for rank, (first, *later) in enumerate(found):
        if rank == 1:
            assert first == "OutOfMemoryError: on this rank only"
        else:
            assert isinstance(first, str)
            assert first.startswith("SessionLeftError: "), first
            assert first.endswith(
                "rank 1 has left the session after step 2 with OutOfMemoryError: on this rank only"
            )
        for number, weights in enumerate(later, 1):
            assert weights == pytest.approx(alone(number, ranks), abs=1e-5)


def test_the_next_trial_begins_together_on_virtual_ranks() -> None:
    check_search(hocket.virtual(3).run(search))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_goes_on(recipe: str) -> None:
    found = hocket.virtual(3).run(search, recipe)
    for rank, (first, *later) in enumerate(found):
        assert isinstance(first, str)
        assert "OutOfMemoryError: on this rank only" in first, rank
        assert not [trial for trial in later if isinstance(trial, str)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "transport",
    [
        "torch",
        pytest.param(
            "mpi",
            marks=[
                pytest.mark.full,
                pytest.mark.mpi,
                pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
            ],
        ),
    ],
)
def test_the_next_trial_begins_together_on_processes(transport: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-c", "from hocket.cli.main import main; main()", "launch", "-n", "2"]
    subprocess.run(
        [*launch, "--transport", transport, __file__, str(tmp_path)], timeout=LONGEST_S, check=True
    )
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    check_search(found)


def test_a_rank_that_cannot_attach_does_not_hold_the_others_up() -> None:
    def attach() -> list[str]:
        told = []
        for number in range(2):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            initial: Any = "none" if (number, hocket.join().rank) == (0, 1) else "rank0"
            try:
                with hocket.attach(model, optimizer, "sgd", initial=initial):
                    told.append("attached")
            except (hocket.errors.AttachError, SessionLeftError, DisagreementError) as error:
                told.append(type(error).__name__)
        return told

    found = hocket.virtual(3).run(attach)
    assert found == [
        ["SessionLeftError", "attached"],
        ["AttachError", "attached"],
        ["SessionLeftError", "attached"],
    ]


def test_sessions_side_by_side_are_left_one_by_one() -> None:
    """A session within another fails on one rank; the outer one goes on."""

    def train() -> tuple[str, list[float]]:
        outer, inner = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        nn.init.constant_(outer.weight, 0.0)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (outer, inner)]
        told = ""
        with hocket.attach(outer, optimizers[0], "sgd") as session:
            batch = torch.full((2, 4), 1.0 + session.rank)
            for step in range(NUM_STEPS):
                if step == 1:
                    try:
                        with hocket.attach(inner, optimizers[1], "sgd"):
                            if session.rank == 1:
                                raise OutOfMemoryError
                            inner(batch).sum().backward()
                    except (OutOfMemoryError, SessionLeftError) as error:
                        told = type(error).__name__
                optimizers[0].zero_grad()
                outer(batch).sum().backward()
                optimizers[0].step()
        return told, outer.weight.flatten().tolist()

    found = hocket.virtual(2).run(train)
    assert [told for told, _ in found] == ["SessionLeftError", "OutOfMemoryError"]
    for _, weights in found:
        assert weights == pytest.approx(alone(0, 2), abs=1e-5)


if __name__ == "__main__":
    found = search()
    (Path(sys.argv[1]) / str(hocket.join().rank)).write_text(json.dumps(found))
