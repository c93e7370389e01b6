"""`hocket run`, whole: the same weights over MPI, on virtual ranks and in one process, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


#: Carries out a command: its status and what it printed.
Hocket = Callable[..., Any]


def run(hocket: Hocket, out: Path, *arguments: str) -> Path:
    ended = hocket("run", *arguments, "--out", str(out))
    assert ended.status == 0, ended.out + ended.err
    assert "results in" in ended.out
    return out


@pytest.fixture(scope="module")
def results(hocket: Hocket, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the same training, carried out in different ways."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {
        "mpi": ["sgd", "-n", "4"],
        "virtual": ["sgd", "-n", "4", "--transport", "virtual"],
        "one process": ["sgd", "batch_size=128"],
    }
    if os.environ.get("HOCKET_CELLS") == "all":
        ways |= {"mpi agd": ["agd", "-n", "4"], "virtual agd": ["agd", "-n", "4", "--transport", "virtual"]}
    start_s = time.monotonic()
    folders = {}
    for way, arguments in ways.items():
        folders[way] = run(hocket, folder / way, *arguments)
        if way == "mpi":
            (folder / "seconds").write_text(str(time.monotonic() - start_s))
    return folders


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


@pytest.mark.parametrize(
    "way", ["virtual", *(pytest.param(f"{each} agd", marks=pytest.mark.full) for each in ("mpi", "virtual"))]
)
def test_the_same_order_of_additions_gives_the_same_bits(results: dict[str, Path], way: str) -> None:
    expected, given = weights(results["mpi"]), weights(results[way])
    assert expected.keys() == given.keys()
    assert all(torch.equal(expected[name], given[name]) for name in expected)


def test_all_files_have_the_mode_that_the_umask_gives(results: dict[str, Path]) -> None:
    modes = {path.name: path.stat().st_mode for path in results["virtual"].iterdir() if path.is_file()}
    assert len(set(modes.values())) == 1, modes


def test_one_process_with_the_fourfold_batch_gives_the_same_weights(results: dict[str, Path]) -> None:
    expected, given = weights(results["one process"]), weights(results["mpi"])
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=2e-6)


def test_it_learns_within_a_minute(results: dict[str, Path]) -> None:
    summary = json.loads((results["mpi"] / "summary.json").read_text())
    assert summary["valid_accuracy"] >= 0.96
    assert float((results["mpi"].parent / "seconds").read_text()) < 60


def test_what_a_run_leaves_behind(results: dict[str, Path]) -> None:
    folder = results["mpi"]
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (summary["ranks"], summary["transport"], summary["steps"]) == (4, "mpi", 240)
    assert summary["valid_accuracy_ranks"] == [summary["valid_accuracy"]] * 4
    assert rows[-1]["step"] == summary["steps"]
    assert rows[-1]["valid_accuracy"] == summary["valid_accuracy"]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] / 10
    assert rows[-1]["bytes_sent"] == pytest.approx(summary["bytes_sent_per_step"] * 240)
    assert 0 < summary["exposed_wait_fraction"] < 1
    assert config["ranks"] == 4
    assert config["strategy"]["gradients"][0]["segments"] == {
        "name": "bytes",
        "size_mb": 25.0,
        "first_mb": None,
    }
    assert (folder / "metrics.png").read_bytes().startswith(b"\x89PNG")


def test_a_runs_config_repeats_it(results: dict[str, Path], hocket: Hocket, tmp_path: Path) -> None:
    again = run(hocket, tmp_path / "again", str(results["virtual"] / "config.yaml"))
    expected, given = weights(results["virtual"]), weights(again)
    assert all(torch.equal(expected[name], given[name]) for name in expected)
