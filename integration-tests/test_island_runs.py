"""`hocket run` of islands ends where the same run of whole models does, with a rank for each island.

Of so many ranks each whole model reads in a step what all ranks of an island read.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from islands.task import Dropped
from safetensors.torch import load_file

from hocket.cli.main import main
from hocket.cli.planned import planned_run, situation_of
from hocket.cli.ranking import run_virtual
from hocket.comparison.record import read_record
from hocket.training.observer import Display
from hocket.training.run import load_run

HERE = Path(__file__).parent
PER_BATCH = 4
SETTINGS = ["epochs=3", "log_every=3", "eval_every=6", "timeout_s=60"]
DILOCO = ["diloco", "parameters.0.every=4", "optimizer={name: sgd, lr: 0.3, momentum: 0.9}"]


@dataclass(frozen=True)
class Shape:
    """Islands, with the options that start them.

    Attributes:
        islands: number of islands.
        words: the options.
        task: the run's.
        bound: the largest difference from results of whole models, in absolute terms and relative to each value.
        ranks: number of an island's ranks.
        shares: number of batches that an island reads in a step.
    """

    islands: int
    words: tuple[str, ...]
    task: str = "islands.task:Characters"
    bound: float = 1e-12
    ranks: int = 2
    shares: int = 2


TORCH = Shape(2, ("island.shard=2", "--transport", "torch"))
SHORT = replace(TORCH, task="islands.task:Short", bound=1e-6)
MPI = Shape(2, ("island.shard=2", "--transport", "mpi"))
HSDP = Shape(2, ("island.shard=2", "island.replicate=2", "--transport", "torch"), ranks=4, shares=4)
FOUR = Shape(4, ("island.shard=2", "--transport", "torch"))
TENSOR = Shape(2, ("island.tensor=2", "--transport", "torch"), "islands.task:Even", shares=1)
TENSOR_SHORT = replace(TENSOR, task="islands.task:EvenShort", bound=1e-6)
BOTH = Shape(
    2, ("island={shard: 2, tensor: 2}", "--transport", "torch"), "islands.task:Even", ranks=4, shares=2
)


def hocket(*words: str) -> str:
    """Run a command to its end, and return what it printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "hocket", *words],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def run_islands(folder: Path, shape: Shape, *words: str) -> str:
    settings = [f"task={shape.task}", *SETTINGS, f"batch_size={PER_BATCH}", *shape.words]
    return hocket("run", *words, *settings, "-n", str(shape.islands * shape.ranks), "--out", str(folder))


def run_whole(folder: Path, shape: Shape, *words: str) -> None:
    recipe, *overrides = words
    batch = f"batch_size={PER_BATCH * shape.shares}"
    settings = [f"task={shape.task}", *SETTINGS, batch, f"ranks={shape.islands}", "transport=virtual"]
    folder.mkdir()
    run_virtual(load_run(recipe, [*overrides, *settings]), folder, display=Display.QUIET)


def compare(given: Path, expected: Path, shape: Shape) -> None:
    """Compare the results of islands with those of whole models; their losses relatively, by a thousand bounds."""
    values, wholes = (load_file(folder / "model.safetensors") for folder in (given, expected))
    assert values.keys() == wholes.keys()
    for name, whole in wholes.items():
        assert torch.allclose(values[name], whole, rtol=shape.bound, atol=shape.bound), name
    rows, of_wholes = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (given, expected)
    )
    assert [row["step"] for row in rows] == [row["step"] for row in of_wholes]
    for row, of_whole in zip(rows, of_wholes, strict=True):
        for name in ("train_loss", "valid_loss", "valid_accuracy", "consensus_distance"):
            if name in of_whole:  # a run that ends early validates then, too
                assert row[name] == pytest.approx(of_whole[name], 1e3 * shape.bound, shape.bound)
        assert row["bytes_sent"] <= 0.8 * of_whole["bytes_sent"]
    summary, of_whole = (json.loads((folder / "summary.json").read_text()) for folder in (given, expected))
    assert (summary["ranks"], summary["islands"]) == (shape.islands * shape.ranks, shape.islands)
    expected_losses = of_whole["valid_loss_ranks"]
    assert summary["valid_loss_ranks"] == pytest.approx(expected_losses, rel=1e3 * shape.bound)


def test_a_run_of_islands(tmp_path: Path) -> None:
    """Its uneven batches count by their samples, and a rank without samples evaluates with its island."""
    given, expected = tmp_path / "islands", tmp_path / "wholes"
    printed = run_islands(given, TORCH, *DILOCO)
    assert "4 ranks in 2 islands of 2 over torch" in printed
    assert "4 ranks in 2 islands over torch: validation" in printed
    run_whole(expected, TORCH, *DILOCO)
    compare(given, expected, TORCH)
    assert read_record(given, "").ranks_in_words == "4 ranks in 2 islands"


def test_a_run_of_tensor_parallel_islands(tmp_path: Path) -> None:
    """It sends what is planned: split parameters by halves, and those that the plan leaves whole as they are."""
    given, expected = tmp_path / "islands", tmp_path / "wholes"
    shape = replace(TENSOR, task="islands.task:Dropped")
    run_islands(given, shape, "agd", "clip_grad_norm=0.05")
    run_whole(expected, shape, "agd", "clip_grad_norm=0.05")
    compare(given, expected, shape)
    run, placement = planned_run("agd", (f"task={shape.task}", "island.tensor=2"), 4, ())
    planned = situation_of(run, Dropped(), placement, None).plan(run.strategy)
    summary = json.loads((given / "summary.json").read_text())
    assert summary["bytes_sent_per_step"] == pytest.approx(planned.bytes_per_step, rel=1e-9)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", [TORCH, BOTH], ids=["fsdp", "fsdp and tensor parallel"])
def test_an_interrupted_run_of_islands_goes_on_within_an_epoch(shape: Shape, tmp_path: Path) -> None:
    given, expected = tmp_path / "islands", tmp_path / "wholes"
    run_islands(given, shape, *DILOCO, "steps=9", "checkpoint.every=9")
    hocket("resume", str(given), "steps=null")
    run_whole(expected, shape, *DILOCO)
    compare(given, expected, shape)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (SHORT, DILOCO),
        (SHORT, ["agd"]),
        (SHORT, ["dpsgd"]),
        (TORCH, ["agd", "clip_grad_norm=0.05", "accumulate=2"]),
        pytest.param(MPI, DILOCO, marks=pytest.mark.mpi),
        pytest.param(MPI, ["dpsgd"], marks=pytest.mark.mpi),
        (HSDP, DILOCO),
        (TENSOR, DILOCO),
        (TENSOR_SHORT, [*DILOCO[:2], "optimizer={name: sgd, lr: 0.1}"]),
        (TENSOR_SHORT, ["agd", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}"]),
        (BOTH, DILOCO),
        (BOTH, ["agd", "clip_grad_norm=0.05", "accumulate=2"]),
        (BOTH, ["redsync"]),
        (replace(BOTH, bound=1e-6, task="islands.task:EvenShort"), ["dpsgd"]),
        (FOUR, ["dpsgd", "parameters.0.topology=ring"]),
        (
            FOUR,
            [
                "diloco.two_level",
                DILOCO[-1],
                "gradients.0.over.by=null",
                "gradients.0.over.size=2",
                "parameters.0.every=4",
            ],
        ),
    ],
    ids=[
        "float32, diloco",
        "float32, agd",
        "float32, dpsgd",
        "agd",
        "diloco over mpi",
        "dpsgd over mpi",
        "hsdp",
        "tensor parallel, diloco",
        "tensor parallel, float32, diloco",
        "tensor parallel, float32, agd",
        "fsdp and tensor parallel, diloco",
        "fsdp and tensor parallel, agd",
        "fsdp and tensor parallel, redsync",
        "fsdp and tensor parallel, float32, dpsgd",
        "four islands",
        "two levels",
    ],
)
def test_more_runs_of_islands(shape: Shape, words: list[str], tmp_path: Path) -> None:
    given, expected = tmp_path / "islands", tmp_path / "wholes"
    run_islands(given, shape, *words)
    run_whole(expected, shape, *words)
    compare(given, expected, shape)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_sweep_between_islands(tmp_path: Path) -> None:
    words = [f"task={TORCH.task}", *SETTINGS, "strategy=agd,diloco", "steps=6", *TORCH.words, "-n", "4"]
    hocket("sweep", "sgd", *words, "--out", str(tmp_path / "runs"))
    compared = hocket("compare", str(tmp_path / "runs"))
    assert "agd" in compared
    assert "diloco" in compared


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["agd", "island.shard=3", "-n", "4"],
            "4 ranks cannot be divided into islands of 3: start 6",
        ),
        (
            ["agd", "island.shard=2", "-n", "4", "--transport", "virtual"],
            "island: virtual ranks",
        ),
        (
            ["agd", "island.sharded=2", "-n", "4"],
            r"island.sharded: unknown key. Did you mean .shard.\? Allowed: shard",
        ),
        (["agd", "island.replicate=2", "-n", "4"], "replicate is 2, but shard is 1"),
        (["agd", "island.shard=0", "-n", "4"], "shard must be 1 to"),
        (
            ["eager.majority", "island.shard=2", "-n", "4"],
            "cannot exchange a sharded model, because with collective eager",
        ),
        (["gossipgrad", "island.shard=2", "-n", "4"], "samples: exchanging samples"),
        (["agd", "optimizer=torch.optim:LBFGS", "island.shard=2", "-n", "4"], "LBFGS steps with a closure"),
        (
            ["agd", "optimizer=adafactor", "island.shard=2", "-n", "4"],
            "torch's Adafactor cannot step a sharded model",
        ),
        (
            ["agd", "optimizer.fused=true", "island.shard=2", "-n", "4"],
            "torch's SGD with fused=True cannot step a sharded model",
        ),
        (
            ["agd", "task=islands.task:Even", "island.tensor=3", "-n", "6"],
            "task islands.task:Even cannot use island.tensor=3: 4 heads do not divide evenly",
        ),
        (
            ["agd", "island.tensor=2", "-n", "4"],
            "task digits cannot use island.tensor=2: there is no plan of tensor parallelism",
        ),
        (
            ["agd", "task=islands.task:Uneven", "island.tensor=2", "-n", "4"],
            r"parameter head.weight of shape .13, 12. does not divide evenly along its dimension 0",
        ),
        (
            ["agd", "task=islands.task:Misnamed", "island.tensor=2", "-n", "4"],
            "tensor_plan names 'layers.*.attention', but the model has no such module",
        ),
        (
            ["agd", "task=islands.task:Even", "island.tensor=2", "optimizer.foreach=true", "-n", "4"],
            "optimizer.foreach: with foreach, torch cannot update tensor-parallel parameters",
        ),
        (
            ["eager.majority", "task=islands.task:Even", "island.tensor=2", "-n", "4"],
            "cannot exchange a sharded model, because with",
        ),
        (["eapipe", "island.shard=2", "-n", "4"], "engine .* needs whole models, but an island of 2 ranks"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_cannot_run_is_refused_in_a_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hocket", "run", "--transport", "torch", "--dry-run", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capfd.readouterr()
    [line] = shown.err.splitlines()
    assert re.search(message, line), line
    assert not shown.out
