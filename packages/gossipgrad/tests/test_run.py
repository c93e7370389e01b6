"""`hocket run` with samples that travel: every recipe learns, and a run that was cut off ends as one that was not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hocket.cli.main import main
from hocket.session.replica_session import ReplicaSession

#: The digits' 1442 samples: 8 steps make an epoch, whose last one not all ranks have samples for.
COMMON = ("-n", "3", "--transport", "virtual", "batch_size=65", "log_every=3")
TIMES = {"seconds", "steps_per_second", "exposed_wait_fraction", "overlap_share", "exposed_wait_s"}
TIMES |= {"wait_share", "wait_share_min", "wait_share_max", "exposed_wait_fraction_ranks"}


class Cut(BaseException):
    """The run is interrupted."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that carries out `hocket run` here, and returns its exit status."""

    def hocket_run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["hocket", "run", *arguments, *COMMON])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return hocket_run


def results(folder: Path) -> Any:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return [{key: value for key, value in row.items() if key not in TIMES} for row in (*rows, summary)]


@pytest.mark.parametrize(
    "recipe", ["gossipgrad", "gossipgrad.gradients", "gossipgrad.agd_every_log", "gossipgrad.random"]
)
def test_recipes_learn(recipe: str, run: Callable[..., int], tmp_path: Path) -> None:
    assert run(recipe, "epochs=5", "--out", str(tmp_path)) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 40
    assert summary["valid_accuracy"] > 0.85


@pytest.mark.parametrize("step", [6, 13, 16])
def test_a_run_that_was_cut_off(
    step: int, run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first epoch, in the second one, whose batches are another rank's, and at its end."""
    arguments = ("gossipgrad", "epochs=5", "checkpoint.every=4")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(*arguments, "--out", str(whole)) == 0
    end_batch = ReplicaSession.end_batch

    def cut_off(session: ReplicaSession) -> None:
        end_batch(session)
        if session.step == step:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(ReplicaSession, "end_batch", cut_off)
        with pytest.raises(Cut):
            run(*arguments, "--out", str(cut))
    assert run(*arguments, "--out", str(cut), "--resume") == 0
    assert results(cut) == results(whole)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, cut))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
