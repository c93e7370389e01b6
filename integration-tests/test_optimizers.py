"""Optimizers whose momentum a strategy would take over and cannot: refused before a rank starts, with what works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from matrix import recipes
from trial import Toy, batches, loss_of

import hocket
from hocket.cli.checking import check_run
from hocket.cli.main import cli
from hocket.cli.planning import plan_command
from hocket.errors import AttachError
from hocket.training.run import load_run

TAKING = {"name": "momentum_correction", "compressor": {"name": "error_feedback", "compressor": "topk"}}
CLIPPED = {"name": "local_clipping", "max_norm": 1.0, "compressor": TAKING}
ADAMW = "optimizer={name: adamw, lr: 0.001}"


def sparse(compressor: Any) -> dict[str, Any]:
    return {"gradients": [{"collective": "sparse_allreduce", "compressor": compressor}]}


def takes(recipe: str) -> bool:
    return any(
        each.compressor and each.compressor.traits.applies_optimizer_terms
        for each in hocket.compose(recipe).gradients
    )


TARGETS: list[Any] = [
    *(recipe for recipe in recipes() if takes(recipe)),
    {"strategy": sparse(CLIPPED)},
    {"strategy": sparse("topk"), "phases": {"2": sparse(CLIPPED)}},
]


def attached(strategy: Any) -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hocket.attach(model, optimizer, strategy) as session:
        for batch in session.data(batches(session.peer.rank, 3)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target if isinstance(target, str) else None)
def test_the_override_that_is_offered_works(target: Any) -> None:
    run = load_run(target, (ADAMW,))
    with pytest.raises(AttachError) as caught:
        check_run(run)
    message = str(caught.value)
    offered = re.fullmatch(
        r"(\S*gradients\.0\.compressor): in [a-z_.]+, momentum correction needs the momentum of torch\.optim\.SGD, not "
        r"that of AdamW: use SGD, or (\1\S*=.*)",
        message,
    )
    assert offered, message
    assert offered[2] == caught.value.override
    if isinstance(target, str):
        with pytest.raises(AttachError, match=re.escape(message)):
            plan_command(target, (ADAMW,), 4)
    with pytest.raises(AttachError, match=re.escape(message)):
        hocket.virtual(4).run(attached, run.strategy)
    mended = load_run(target, (ADAMW, offered[2]))
    check_run(mended)
    hocket.virtual(4).run(attached, mended.strategy)


def test_recommend_says_what_a_recipe_asks_of_the_optimizer() -> None:
    situation = ["--params", "1M", "--hosts", "4x1", "--bandwidth", "100mbit", "--step", "100ms", "--json"]

    def told(*more: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            CliRunner().invoke(cli, ["recommend", *more, *situation], catch_exceptions=False).stdout
        )
        return answer

    adamw = ("optimizer=AdamW",)
    assert "or gradients.0.compressor.correct_momentum=false" in told(*adamw)["left_out"]["redsync"]
    changed = told("redsync", "gradients.0.compressor.correct_momentum=false", *adamw)["strategies"]
    [row] = [each for each in changed if each["strategy"] == "redsync, correct_momentum=false"]
    assert (row["loss_percent"], row["accuracy_points"]) == (None, None)
    [row] = [each for each in told()["strategies"] if each["strategy"] == "redsync"]
    assert row["accuracy_points"] == -0.3


def test_sgd_is_taken() -> None:
    for target in TARGETS:
        check_run(load_run(target, ("optimizer={name: sgd, lr: 0.1, momentum: 0.9}",)))


def test_a_file_on_a_recipe_without_a_strategy_is_that_recipe() -> None:
    assert load_run({"recipe": "eapipe"}).strategy == load_run("eapipe").strategy
