"""An environment that has torch and nothing of MPI."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import HERE, check_readme, ended

pytestmark = pytest.mark.usefixtures("python_without_mpi")


def test_there_is_none(python_without_mpi: str, tmp_path: Path) -> None:
    job = ended([python_without_mpi, "-c", "import hocket, torch, mpi4py"], tmp_path)
    assert job.stderr.endswith("ModuleNotFoundError: No module named 'mpi4py'\n")
    assert not Path(python_without_mpi).with_name("mpiexec").exists()


def test_a_run_starts_its_own_ranks(python_without_mpi: str, tmp_path: Path) -> None:
    command = [python_without_mpi, "-m", "hocket", "run", "sgd", "-n", "4", "epochs=1", "--out", "out"]
    job = ended(command, tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert "starting sgd: task digits, 4 ranks over torch, on cpu, 1 thread each" in job.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["transport"], summary["ranks"], summary["steps"]) == ("torch", 4, 12)


def test_the_script_of_the_readme_is_launched(python_without_mpi: str, tmp_path: Path) -> None:
    command = [
        python_without_mpi,
        "-m",
        "hocket",
        "launch",
        "-n",
        "2",
        str(HERE / "readme.py"),
        str(tmp_path),
    ]
    job = ended(command, tmp_path)
    assert job.returncode == 0
    first, last = job.stderr.splitlines()
    assert first.startswith("Hocket: agd on 2 ranks over torch, ")
    assert last.startswith("Hocket: 4 steps in ")
    check_readme(tmp_path, 2, "torch")


def test_a_run_names_a_rank_that_was_killed(python_without_mpi: str, tmp_path: Path) -> None:
    command = [python_without_mpi, "-m", "hocket", "run", "sgd", "-n", "2", "epochs=100000", "log_every=1"]
    job = subprocess.Popen(
        [*command, "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert job.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(sorted(map(int, children))[1], signal.SIGKILL)  # ranks are forked in their order
    _, errors = job.communicate(timeout=60)
    message, advice = errors.splitlines()
    assert advice == (
        "hocket: this run has no checkpoint: run the same command again, from the beginning. With checkpoint.every=N "
        "added, `hocket resume out` can continue it next time"
    )
    assert message.startswith("hocket: at step ")
    assert ": rank 1 has died; rank 1 on " in message
    assert message.endswith(
        " was killed by SIGKILL (out of memory? see the kernel's log); all ranks were ended"
    )
    assert job.returncode == 137
