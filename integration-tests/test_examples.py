"""The scripts of `examples/`, in small; each is what a user would write."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def needs(library: str) -> pytest.MarkDecorator:
    missing = find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} of examples/requirements.txt is not installed")


def launched(folder: Path, script: str, *arguments: str, launcher: tuple[str, ...] = ("-n", "2")) -> str:
    command = [sys.executable, "-m", "hocket", "launch", *launcher, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(told: str) -> float:
    return float(re.findall(r"accuracy ([\d.]+) %", told)[-1])


def text(folder: Path) -> str:
    file = folder / "text.txt"
    file.write_text(
        "a text of few words, and of these few again and again, that a transformer learns soon. " * 200
    )
    return str(file)


def test_the_character_transformer_learns(tmp_path: Path) -> None:
    given = ["--text", text(tmp_path), "--steps", "40", "--context", "32", "--width", "32"]
    told = launched(tmp_path, "characters.py", *given, "--strategy", "diloco", "parameters.0.every=10")
    assert float(re.findall(r"held-out loss ([\d.]+)", told)[0]) < 3.5  # 5.5 is that of a guess


@pytest.mark.full
def test_the_resnet_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    given = ["--samples", "1280", "--width", "4", "--out", "saved"]
    launched(tmp_path, "resnet.py", *given, "--epochs", "1")
    told = launched(tmp_path, "resnet.py", *given, "--epochs", "2")
    assert "epoch 1:" not in told
    assert "40 steps" in told
    assert accuracy(told) > 20


@pytest.mark.full
@needs("lightning")
@pytest.mark.parametrize("strategy", ["sgd", "diloco parameters.0.every=10"])
def test_fabric_s_loop_trains(tmp_path: Path, strategy: str) -> None:
    told = launched(tmp_path, "fabric_loop.py", "--strategy", *strategy.split())
    assert told.count("mean of 2 ranks' last batches") == 3
    assert accuracy(told) > 70


@pytest.mark.full
@needs("lightning")
def test_fabric_s_loop_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    given = ["--strategy", "dpsgd", "--out", "saved"]
    whole = launched(tmp_path, "fabric_loop.py", *given[:2], "--epochs", "2")
    launched(tmp_path, "fabric_loop.py", *given, "--epochs", "1")
    told = launched(tmp_path, "fabric_loop.py", *given, "--epochs", "2")
    assert "epoch 1:" not in told
    assert whole.splitlines()[-2:] == told.splitlines()[-2:]
    assert "model" in torch.load(tmp_path / "saved" / "model.pt")


@pytest.mark.full
@needs("accelerate")
@pytest.mark.parametrize("transport", ["torch", "mpi"])
def test_accelerate_s_loop_trains(tmp_path: Path, transport: str) -> None:
    launcher = ("-n", "2", "--transport", transport)
    told = launched(tmp_path, "accelerate_loop.py", "--strategy", "sgp", launcher=launcher)
    assert accuracy(told) > 60


@pytest.mark.full
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("fabric_islands.py", marks=needs("lightning")),
        pytest.param("accelerate_islands.py", marks=needs("accelerate")),
    ],
)
@pytest.mark.parametrize("strategy", ["agd", "diloco parameters.0.every=10"])
def test_a_framework_s_loop_trains_islands(tmp_path: Path, script: str, strategy: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, str(EXAMPLES / script), "--strategy", *strategy.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 islands of 2 ranks (shard 2): 0-1, 2-3" in done.stderr
    assert accuracy(done.stdout) > 70


@pytest.mark.full
@needs("nbclient")
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat: Any = import_module("nbformat")
    nbclient: Any = import_module("nbclient")
    notebook = nbformat.read(EXAMPLES / "virtual.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=115, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "MB a rank" in "".join(output.get("text", "") for output in outputs)
