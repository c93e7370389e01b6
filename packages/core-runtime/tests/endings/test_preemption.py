"""Jobs that are asked to end, as schedulers ask before they take a machine: they save together, and go on later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import hocket
from hocket.checkpoint.folder import newest_first
from hocket.checkpoint.manifest import Manifest
from hocket.cli.main import main
from hocket.errors import HocketError
from hocket.launch.mpiexec import find_mpiexec
from hocket.transport.job_notes import PID_FOLDER_VARIABLE

if TYPE_CHECKING:
    from conftest import Job, Start

needs_mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]
pytestmark = pytest.mark.timeout(180)

HERE = Path(__file__).parent
HOCKET = [sys.executable, "-c", "from hocket.cli.main import main; main()"]
FOR_EVER = "epochs=100000"
VIRTUAL, ONE = ["-n", "3", "--transport", "virtual"], ["-n", "1"]


def is_training(out: Path) -> bool:
    return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; raises if it is not whole."""
    return Manifest.read(newest_first(folder)[0]).step


@pytest.mark.parametrize(
    ("recipe", "ranks", "number"),
    [
        pytest.param("local", ["-n", "2"], signal.SIGUSR1, marks=[*needs_mpi, pytest.mark.full]),
        pytest.param("overlap_sgp", ["-n", "2"], signal.SIGTERM, marks=[*needs_mpi, pytest.mark.full]),
        ("sgd", ["-n", "2", "--transport", "torch"], signal.SIGTERM),
        ("dpsgd", VIRTUAL, signal.SIGTERM),
        pytest.param("sgd", ONE, signal.SIGUSR1, marks=pytest.mark.full),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_run_saves_and_goes_on(
    recipe: str, ranks: list[str], number: signal.Signals, start: Start, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    late = "delays={name: random_subset, count: 1, seconds: 0.05}"
    job = start(
        [*HOCKET, "run", recipe, *ranks, FOR_EVER, "log_every=3", late, "--out", str(out)], cwd=tmp_path
    )
    job.wait_for(lambda: is_training(out))
    job.signal(number)
    ended = job.end()
    step = saved_step(out / "checkpoints")
    path = out / "checkpoints" / f"step-{step:08d}"
    assert (
        ended.errors.strip("\0\n")
        == f"hocket: asked to end: saved after step {step} in {path}; all ranks end"
    )
    assert ended.status == 143
    # On virtual ranks, which start sooner.
    resume = ["hocket", "resume", str(out), "--transport", "virtual", f"steps={step + 3}"]
    monkeypatch.setattr(sys, "argv", resume)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert json.loads((out / "summary.json").read_text())["steps"] == step + 3


@pytest.fixture
def script(start: Start, tmp_path: Path) -> Callable[..., Job]:
    """Return a function that starts a user's script on three ranks, under a bare mpiexec."""

    def begin(how: str) -> Job:
        (tmp_path / "ready").mkdir()
        rank = [sys.executable, str(HERE / "preempted.py"), how, str(tmp_path)]
        pids = {**os.environ, "PIDS": str(tmp_path / "pids"), "OMP_NUM_THREADS": "1"}
        pids.pop(PID_FOLDER_VARIABLE, None)
        job = start(find_mpiexec().command(3, rank, folder=tmp_path / "launcher"), env=pids)
        job.wait_for(lambda: len(list((tmp_path / "ready").iterdir())) == 3)
        return job

    return begin


def messages(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("hocket:")]


class TestAScript:
    pytestmark = needs_mpi

    @pytest.mark.parametrize(
        "how",
        ["own loop", *(pytest.param(each, marks=pytest.mark.full) for each in ("accumulate", "waiting"))],
    )
    def test_saves_when_mpiexec_passes_the_signal_on(
        self, how: str, script: Callable[..., Job], tmp_path: Path
    ) -> None:
        job = script(how)
        job.signal(signal.SIGUSR1)
        ended = job.end()
        step = saved_step(tmp_path / "saved")
        [message] = messages(ended.errors)
        assert f"saved after step {step} in" in message
        assert ended.status == 143

    def test_says_which_rank_has_not_heard(self, script: Callable[..., Job], tmp_path: Path) -> None:
        job = script("deaf")
        for rank in (0, 2):
            os.kill(job.pid_of(rank), signal.SIGUSR1)
        ended = job.end()
        [message] = messages(ended.errors)
        assert message == (
            "hocket: asked to end, but rank 1 did not hear of it (can they reach the host of the rank that got the "
            "signal?) within 2 s: all ranks end without a new checkpoint; the last one remains"
        )
        assert ended.status == 143
        assert not (tmp_path / "saved").exists()

    def test_ends_without_a_save_when_a_step_takes_too_long(
        self, script: Callable[..., Job], tmp_path: Path
    ) -> None:
        job = script("slow")
        job.signal(signal.SIGUSR1)
        [message] = messages(job.end().errors)
        assert message.startswith("hocket: asked to end, but step ")
        assert message.endswith(
            " was not finished and saved within 2 s: all ranks end without a new checkpoint; the last one remains"
        )

    def test_that_has_come_to_its_end_ends_well(self, script: Callable[..., Job], tmp_path: Path) -> None:
        job = script("last step")
        os.kill(job.pid_of(1), signal.SIGUSR1)
        ended = job.end()
        assert (ended.status, messages(ended.errors)) == (0, [])


@pytest.mark.parametrize(
    ("how", "number", "to"),
    [
        ("alone", signal.SIGTERM, "rank 1"),
        pytest.param("own loop", signal.SIGUSR1, "rank 1", marks=pytest.mark.full),
        ("workers", signal.SIGTERM, "all processes"),
    ],
)
def test_a_signal_that_only_some_processes_get_saves_too(
    how: str, number: signal.Signals, to: str, start: Start, tmp_path: Path
) -> None:
    """One rank alone; or the launcher, the ranks and their loaders' workers at once, as systemd and Slurm do it."""
    (tmp_path / "ready").mkdir()
    command = [
        *HOCKET,
        "launch",
        "-n",
        "2",
        "--transport",
        "torch",
        str(HERE / "preempted.py"),
        how,
        str(tmp_path),
    ]
    mark = f"PIDS={tmp_path / 'pids'}"
    job = start(command, env={**os.environ, "PIDS": str(tmp_path / "pids"), "OMP_NUM_THREADS": "1"})
    job.wait_for(lambda: len(list((tmp_path / "ready").iterdir())) == 2)
    if to == "rank 1":
        os.kill(job.pid_of(1), number)
    else:
        everybody = processes_with(mark)
        assert len(everybody) >= 1 + 2 + 2 * 2
        for process in everybody:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
    ended = job.end()
    step = saved_step(tmp_path / "saved")
    [message] = messages(ended.errors)
    assert f"saved after step {step} in" in message, ended.errors
    assert ended.status == 143
    assert not processes_with(mark), "a worker has outlived its rank"


def processes_with(variable: str) -> list[int]:
    """Return the processes that have this in their environment, workers of loaders among them."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def test_no_thread_outlives_a_session_that_a_signal_ends(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        with hocket.attach(model, optimizer, "sgd") as session:
            session.save_on_signal(tmp_path)
            for _ in session.data(range(20_000), same_batches=True):
                if session.step == 2:
                    signal.raise_signal(signal.SIGUSR1)
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()

    with pytest.raises(SystemExit, match="143"):
        train()
    # It would free tensors while Python ends, which aborts the process.
    assert "hocket signals" not in [thread.name for thread in threading.enumerate()]


def test_a_function_saves_in_the_session_s_place(tmp_path: Path) -> None:
    """In a loop that asks for no batches of the session's, and whose model is never called."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        with hocket.attach(model, optimizer, "sgd") as session:
            end_if_asked = session.save_on_signal(lambda: session.save(tmp_path / "own"))
            for _ in range(1000):
                if session.step == 2:
                    signal.raise_signal(signal.SIGUSR1)
                model.weight.sum().backward()
                optimizer.step()
                end_if_asked()
                time.sleep(0.005)

    with pytest.raises(SystemExit, match="143"):
        train()
    assert 3 <= saved_step(tmp_path / "own") < 1000


def test_one_session_of_a_process_saves_on_a_signal(tmp_path: Path) -> None:
    """Virtual ranks whose threads have ended are none, also where a session was left open."""

    def attach() -> hocket.Session:
        model = torch.nn.Linear(4, 2)
        return hocket.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), "sgd")

    def leave_open() -> None:
        attach().save_on_signal(tmp_path / "virtual")

    hocket.virtual(2).run(leave_open)
    with attach() as first, attach() as second:
        first.save_on_signal(tmp_path / "own")
        for each in (first, second):
            with pytest.raises(HocketError, match="was already called, for this session or another of this"):
                each.save_on_signal(tmp_path / "own")
        first.close()
        second.save_on_signal(tmp_path / "own")


@pytest.mark.parametrize("handled", [signal.SIGTERM, signal.SIGUSR1, None])
def test_signals_that_the_script_handles_are_left_to_it(
    tmp_path: Path, handled: signal.Signals | None
) -> None:
    """The handlers that stood before `attach` count, as frameworks set some of their own later."""

    def own(*_: object) -> None: ...

    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in numbers]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        if handled is not None:
            signal.signal(handled, own)
        with hocket.attach(model, optimizer, "sgd") as session:
            given = [signal.signal(each, own) for each in numbers]  # a framework's
            session.save_on_signal(tmp_path, unless_handled=True)
            assert (signal.getsignal(signal.SIGTERM) == own) == (handled is not None)
            assert (signal.getsignal(signal.SIGUSR1) == own) == (handled is not None)
        assert given == [own if each == handled else signal.SIG_DFL for each in numbers]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
