"""Endings of whole runs of `hocket run` that do not reach their end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hocket.launch.mpiexec import find_mpiexec
from hocket.transport.job_notes import PID_FOLDER_VARIABLE

if TYPE_CHECKING:
    from conftest import Job, Start

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

HOCKET = [sys.executable, "-c", "from hocket.cli.main import main; main()"]
NUM_STEPS = 100_000

# Tasks whose loss fails in its fourth step, or is NaN then on rank 1.
# The first loss is that of the sample that is evaluated before training.
TASK = """
from dataclasses import dataclass
from hocket.task import Digits
from hocket.launch.joining import join

calls = 0

@dataclass(frozen=True)
class Failing(Digits):
    def loss(self, output, target):
        global calls
        calls += 1
        if calls == 5 and join().rank == 1:
            raise ValueError("broken on purpose")
        return super().loss(output, target)

@dataclass(frozen=True)
class FailingEverywhere(Digits):
    def loss(self, output, target):
        global calls
        calls += 1
        if calls == 5:
            raise ValueError("broken on purpose")
        return super().loss(output, target)

@dataclass(frozen=True)
class Nan(Digits):
    def loss(self, output, target):
        global calls
        calls += 1
        return super().loss(output, target) * (float("nan") if calls == 5 and join().rank == 1 else 1.0)
"""


@pytest.fixture
def train(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Return a function that begins a run of two ranks which leave their numbers where the job looks."""

    def begin(*args: str) -> Job:
        arguments = [
            "run",
            "sgd",
            *args,
            f"epochs={NUM_STEPS}",
            "log_every=1",
            "--out",
            str(tmp_path / "out"),
        ]
        ranks = find_mpiexec().command(2, [*HOCKET, *arguments], folder=tmp_path / "launcher")
        environment = {**os.environ, PID_FOLDER_VARIABLE: str(tmp_path / "pids"), "OMP_NUM_THREADS": "1"}
        return start(ranks, env=environment, cwd=tmp_path)

    return begin


def is_training(out: Path) -> bool:
    return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0


def messages(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("hocket:")]


def test_an_error_in_the_users_task_on_one_rank(start: Start, tmp_path: Path) -> None:
    (tmp_path / "failing_task.py").write_text(TASK)
    job = start([*HOCKET, "run", "sgd", "task=failing_task:Failing", "-n", "2"], cwd=tmp_path)
    ended = job.end()
    assert messages(ended.errors) == [
        "hocket: rank 1 at step 3: ValueError: broken on purpose; all ranks end"
    ]
    assert ended.errors.count("Traceback") == 1
    assert f'File "{tmp_path}/failing_task.py", line 14, in loss' in ended.errors
    assert "MPI_ABORT" not in ended.errors
    assert ended.status == 1


@pytest.mark.parametrize("recipe", [pytest.param("sgd", marks=pytest.mark.full), "agd"])
def test_nan_on_one_rank_is_told_by_that_one(recipe: str, start: Start, tmp_path: Path) -> None:
    (tmp_path / "failing_task.py").write_text(TASK)
    command = [*HOCKET, "run", recipe, "task=failing_task:Nan", "-n", "2", "--transport", "torch"]
    ended = start(command, cwd=tmp_path).end()
    [message] = ended.errors.strip("\0\n").splitlines()
    assert message.startswith(
        "hocket: rank 1 at step 3: NonFiniteError: the gradients of rank 1 at step 3 hold NaN"
    )
    assert ended.status == 1


@pytest.mark.full
def test_an_error_on_all_of_four_ranks_is_told_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "failing_task.py").write_text(TASK)
    ended = start(
        [*HOCKET, "run", "sgd", "task=failing_task:FailingEverywhere", "-n", "4"], cwd=tmp_path
    ).end()
    [message] = messages(ended.errors)
    assert message.endswith("at step 3: ValueError: broken on purpose; all ranks end")
    assert ended.errors.count("Traceback") == 1
    assert "help message" not in ended.errors


LOADING = """
import torch

import hocket


def attached():
    model = torch.nn.Linear(2, 1)
    return model, hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "sgd")


model, session = attached()
with session:
    for step in range(5):
        if step == 3:
            session.save("saved")
        model(torch.ones(1, 2)).sum().backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
_, session = attached()
session.load("saved")
raise ValueError("broken on purpose")
"""


def test_an_error_after_a_load_names_the_step_that_was_loaded(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOADING)
    ended = start([*HOCKET, "launch", "-n", "2", "train.py"], cwd=tmp_path).end()
    [message] = messages(ended.errors)
    assert message.endswith(" at step 3: ValueError: broken on purpose; all ranks end")


def test_ctrl_c_while_training(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["run", "sgd", "-n", "2", f"epochs={NUM_STEPS}", "log_every=1", "--out", str(out)]
    job = start([*HOCKET, *arguments], cwd=tmp_path)
    job.wait_for(lambda: is_training(out))
    job.signal(signal.SIGINT, group=True)
    ended = job.end()
    assert ended.errors.strip("\0\n") == "hocket: SIGINT: all ranks were ended"
    assert ended.status == 130


def test_a_stopped_rank_of_a_joined_run(train: Callable[..., Job], tmp_path: Path) -> None:
    job = train("timeout_s=3")
    job.wait_for(lambda: is_training(tmp_path / "out"))
    os.kill(job.pid_of(1), signal.SIGSTOP)
    ended = job.end()
    [message] = messages(ended.errors)
    assert ", rank 0 waits for rank 1 in " in message
    # It may have been stopped while it computed, or within the same exchange.
    assert "no end after 3 s; rank 1 " in message
    assert ended.status != 0


def test_an_interrupt_of_one_rank_of_a_joined_run(train: Callable[..., Job], tmp_path: Path) -> None:
    job = train()
    job.wait_for(lambda: is_training(tmp_path / "out"))
    os.kill(job.pid_of(1), signal.SIGINT)
    ended = job.end()
    [message] = messages(ended.errors)
    assert message.startswith("hocket: rank 1 at step ")
    assert message.endswith(": interrupted; all ranks end")
    assert "Traceback" not in ended.errors
    assert ended.status != 0
