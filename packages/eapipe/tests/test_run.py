"""`hocket run` and `hocket plan` with the recipes: the same weights over MPI, on virtual ranks and in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hocket.plugin
from hocket.cli.main import main

pytestmark = pytest.mark.skipif(
    "eapipe" not in hocket.plugin.default_registry().installed(), reason="hocket-eapipe is not installed"
)

Run = Callable[..., dict[str, torch.Tensor]]

RECIPES = ["eapipe", "eapipe.pipedream", "eapipe.vertical_sync", "eapipe.spectrain", "eapipe.gpipe"]


@pytest.fixture
def hocket_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that carries out a command in this process."""
    # The ranks that it starts: two threads give other bits than one.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def command(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["hocket", *arguments])
        status = None
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        assert not status

    return command


@pytest.fixture
def run(hocket_command: Callable[..., None]) -> Run:
    """Return a function that trains for two epochs, and returns the weights."""

    def hocket_run(out: Path, *arguments: str) -> dict[str, torch.Tensor]:
        hocket_command("run", *arguments, "epochs=2", "--out", str(out))
        return load_file(out / "model.safetensors")

    return hocket_run


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_any_way_gives_the_same_bits(run: Run, tmp_path: Path) -> None:
    stages = "engine.stages=2"
    expected = run(tmp_path / "one", "eapipe", stages)
    for name, arguments in {"virtual": ["-n", "2", "--transport", "virtual"], "mpi": ["-n", "2"]}.items():
        found = run(tmp_path / name, "eapipe", stages, *arguments)
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    summary = json.loads((tmp_path / "mpi" / "summary.json").read_text())
    assert (summary["ranks"], summary["steps"]) == (2, 92)
    assert summary["valid_accuracy"] > 0.5
    assert summary["bytes_sent_per_step"] > 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns(recipe: str, run: Run, tmp_path: Path) -> None:
    run(tmp_path, recipe, "-n", "2", "--transport", "virtual", "optimizer.lr=0.03")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train_loss"] < 0.8 * rows[0]["train_loss"]


@pytest.mark.timeout(200)
def test_a_mesh_resumes_where_it_was(run: Run, tmp_path: Path) -> None:
    """Two pipelines of two: saved in every 20th step, stopped, and continued."""
    mesh = ["eapipe", "-n", "4", "--transport", "virtual", "engine.pipelines=2", "checkpoint.every=20"]
    expected = run(tmp_path / "whole", *mesh, "steps=40")
    run(tmp_path / "cut", *mesh, "steps=20")
    found = run(tmp_path / "cut", *mesh, "steps=40", "--resume")
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_plan_shows_each_stage(
    hocket_command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    hocket_command("plan", "eapipe", "-n", "4", "engine.pipelines=2")
    told = capsys.readouterr().out
    rows = [line.split() for line in told.splitlines() if line[:2] in ("1 ", "2 ")]
    assert len(rows) == 2
    assert "There are 2 replicas of the model" in told
