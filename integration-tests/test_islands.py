"""Models that FSDP2 or tensor parallelism shards within islands train as the same strategy on whole models does.

The oracle is a virtual rank for each island, with the whole model and all that the island reads.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import RANKS
from islands.cases import CASES, WIDE, full, make, run_whole
from torch.distributed.checkpoint.state_dict_loader import load

import hocket
from hocket.checkpoint.model_files import open_model
from hocket.plan.plan import plan
from hocket.session.save.model_state import load_model
from hocket.session.save.saved_model import open_checkpoint
from hocket.transport.network import NetworkModel

ALL = CASES | WIDE

#: Runs a module of `islands` on ranks to their end, given a folder, the module, the ranks and names.
Start = Callable[..., None]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """One process forks all ranks."""
    errors = tmp_path_factory.mktemp("ranks") / "errors.txt"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(RANKS)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None

    def run(folder: Path, module: str, ranks: int, *names: str) -> None:
        print(json.dumps([str(folder), module, ranks, names]), file=process.stdin, flush=True)
        said = errors.stat().st_size
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n", errors.read_bytes()[said:].decode()

    yield run
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def trained(started: Start, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Train the cases that are chosen, in a launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("islands")
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [
        str(item.callspec.params["name"]) for item in chosen if item.originalname == "test_as_whole_models"
    ]
    for ranks in (4, 8):
        of_ranks = [name for name in names if math.prod(ALL[name].shape) == ranks]
        if of_ranks:
            started(folder, "trained", ranks, *of_ranks)
    return folder


@pytest.fixture(scope="module")
def trained_too(started: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("more islands")
    started(folder, "trained", 4, *(name for name, case in CASES.items() if not case.often))
    started(folder, "trained", 8)
    return folder


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.often])
def test_as_whole_models(name: str, trained: Path) -> None:
    compare(name, trained)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, case in ALL.items() if not case.often])
def test_more_as_whole_models(name: str, trained_too: Path) -> None:
    compare(name, trained_too)


def compare(name: str, trained: Path) -> None:
    """Compare what islands have come to with whole models."""
    case = ALL[name]
    islands = range(case.shape[0])
    shards = [torch.load(trained / f"{name}.{island}.pt", weights_only=True) for island in islands]
    wholes = hocket.virtual(len(islands)).run(lambda: run_whole(case, hocket.join().rank))
    bound = 1e-12 if case.double else 1e-6
    for given, expected in zip(shards, wholes, strict=True):
        for kind in ("own", "mean", "outputs"):
            assert apart(given[kind], expected[kind]) <= bound, kind
        assert apart(given["restored"], given["own"]) == 0
        assert given["distance"] == pytest.approx(expected["distance"], rel=1e-6, abs=bound)
        assert given["skipped"] == expected["skipped"]
        assert given["bytes"] < 0.8 * expected["bytes"]
        if case.style == "tokens":  # whose shards are even
            planned = plan(
                hocket.compose(*case.strategy),
                make(case, 0),
                len(islands),
                NetworkModel(),
                island=case.shape[1],
            )
            assert given["bytes"] == pytest.approx(planned.bytes_per_step * case.steps, rel=1e-9)


def apart(given: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference between tensors of the same names."""
    assert given.keys() == expected.keys()
    return max(float((given[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("module", ["alone", "refused"])
def test_on_ranks(module: str, started: Start, tmp_path: Path) -> None:
    """Each module says what its ranks check."""
    started(tmp_path, module, 4)


def test_islands_as_jobs_of_their_own(started: Start, tmp_path: Path) -> None:
    """Each has a process group of torch's for itself, and the strategy runs between them all the same."""
    started(tmp_path, "jobs", 4, "diloco, uneven")
    compare("diloco, uneven", tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints(started: Start, tmp_path: Path) -> None:
    """Ranks compare runs with such as were never stopped; here the replicas' mean is compared with what holds it."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/notes.txt").touch()
    started(tmp_path, "saved", 4)
    mean = torch.load(tmp_path / "mean.pt", weights_only=True)
    started(tmp_path, "saved", 2)
    assert apart(torch.load(tmp_path / "resumed.pt", weights_only=True), mean) <= 1e-12
    whole = make(CASES["sgd"], 1)
    state = {"model": whole.state_dict()}
    load(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    whole.load_state_dict(state["model"])
    assert apart(full(whole), mean) == 0
    assert apart(torch.load(tmp_path / "read.pt", weights_only=True), mean) == 0
    given = model_of(tmp_path / "dcp", CASES["sgd"])
    assert apart(given, mean) == 0
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    assert apart(model_of(tmp_path / "whole", CASES["sgd"]), mean) == 0
    replicas = [model_of(tmp_path / f"replicas/replica-{number:04d}", CASES["sgd"]) for number in range(2)]
    assert apart(replicas[0], mean) > 1e-3
    halves = {name: (replicas[0][name] + replicas[1][name]) / 2 for name in mean}
    assert apart(halves, mean) <= 1e-12
    [checkpoint] = (tmp_path / "dpsgd").glob("step-*")
    with open_checkpoint(checkpoint) as saved:
        load_model(whole, saved.tensors, "the checkpoint")
    assert apart(full(whole), mean) <= 1e-12


def model_of(folder: Path, case: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of an export, read into a whole model."""
    model = make(case, 1)
    with open_model(folder) as tensors:
        load_model(model, tensors, str(folder))
    return full(model)


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4")
MPI = ("hocket", "launch", "-n", "4", "--transport", "mpi")
TORCH = ("hocket", "launch", "-n", "4", "--transport", "torch")


@pytest.mark.parametrize(
    ("script", "starter"),
    [
        pytest.param("train.py", TORCHRUN, marks=pytest.mark.full),
        pytest.param("train.py", MPI, marks=[pytest.mark.full, pytest.mark.mpi]),
        ("train.py", TORCH),
        pytest.param("tensor_parallel.py", TORCH, marks=pytest.mark.full),
        pytest.param("tensor_parallel.py", TORCHRUN, marks=pytest.mark.full),
        pytest.param("tensor_parallel.py", MPI, marks=[pytest.mark.full, pytest.mark.mpi]),
    ],
    ids=lambda given: given if isinstance(given, str) else given[-1],
)
def test_the_scripts_of_the_page(script: str, starter: tuple[str, ...], tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/islands.md").read_text()
    [code] = (
        code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if f"# {script}:" in code
    )
    (tmp_path / script).write_text(code)
    command = [sys.executable, "-m", *starter, script]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    found = (
        "(shard 2): 0-1, 2-3; each rank reads 1 of 4"
        if script == "train.py"
        else "(tp 2): 0-1, 2-3; each rank reads 1 of 2"
    )
    assert f"2 islands of 2 ranks {found} shares" in job.stderr, job.stderr
    assert float(re.findall(r"accuracy ([0-9.]+)", job.stdout)[0]) > 0.85
