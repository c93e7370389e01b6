"""Scripts of Trainer's, TRL's and Accelerate's under launchers; mpiexec starts the other tests' ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

# TRL's modules alone take long to import.
pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
SCRIPT = str(HERE / "launched_rank.py")
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "accelerate": [
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mpirun_hostfile",  # without it one process is started on CPUs
        "hosts",
    ],
    "hocket": ["-m", "hocket", "launch", "-n", "2", "--transport", "torch"],
    "mpi": ["-m", "hocket", "launch", "-n", "2", "--transport", "mpi"],
}


def ended(folder: Path, *words: str) -> str:
    """Return what a Python program that has ended well wrote, errors first."""
    (folder / "hosts").write_text("localhost slots=2\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **root, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def is_right(folder: Path) -> bool:
    """Return whether Trainer's weights and Accelerate's are those of one process with all samples."""
    trainer_s, accelerate_s = json.loads((folder / "weights.json").read_text())
    assert trainer_s == pytest.approx(tiny.one_process(tiny.Texts(40, masked=True), 2, 1), abs=1e-6)
    alone = tiny.one_process(tiny.Texts(48), 2, 1, shuffle=False)
    return bool(accelerate_s == pytest.approx(alone, abs=1e-6))


BY_MPI = pytest.param("accelerate", marks=[pytest.mark.full, pytest.mark.mpi])


@pytest.mark.parametrize("launcher", ["torchrun", BY_MPI, pytest.param("hocket", marks=pytest.mark.full)])
def test_a_script(launcher: str, tmp_path: Path) -> None:
    ended(tmp_path, *LAUNCHERS[launcher], SCRIPT)
    assert is_right(tmp_path)


@pytest.mark.full
def test_a_script_under_srun(tmp_path: Path) -> None:
    """The variables of a step of srun's, as Slurm sets them; no Slurm."""
    step = {"JOB_ID": os.getpid(), "STEP_ID": 0, "STEP_NUM_TASKS": 2, "STEP_NODELIST": "localhost"}
    ranks = []
    for rank in range(2):
        own = {**step, "PROCID": rank, "LOCALID": rank}
        variables = {f"SLURM_{name}": str(value) for name, value in own.items()}
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, SCRIPT], cwd=tmp_path, env=environment))
    assert [rank.wait(115) for rank in ranks] == [0, 0]
    assert is_right(tmp_path)


@pytest.mark.parametrize("launcher", [BY_MPI, pytest.param("hocket", marks=pytest.mark.full)])
def test_a_loop_of_accelerate_s(launcher: str, tmp_path: Path) -> None:
    example = HERE.parents[2] / "examples" / "accelerate_loop.py"
    shown = ended(
        tmp_path, *LAUNCHERS[launcher], str(example), "--strategy", "diloco", "parameters.0.every=8"
    )
    assert float(shown.rpartition("accuracy ")[2].removesuffix(" %\n")) > 80  # of four classes


@pytest.mark.full
def test_accelerate_launch_without_a_hostfile_starts_one_rank_which_says_so(tmp_path: Path) -> None:
    example = HERE.parents[2] / "examples" / "accelerate_loop.py"
    shown = ended(tmp_path, *LAUNCHERS["accelerate"][:-2], str(example), "--epochs", "1")
    assert shown.count("this process trains alone") == 1
    assert "start the ranks with `hocket launch -n 4 SCRIPT`" in shown
    assert "mean of 1 last batches" in shown


of_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


def weights(folder: Path, launcher: list[str], *words: str) -> list[list[float]]:
    ended(folder, *launcher, str(HERE / "trl_rank.py"), "weights.json", *words)
    left: list[list[float]] = json.loads((folder / "weights.json").read_text())
    return left


@pytest.mark.full
@of_trl
@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        ("hocket", "whole"),
        pytest.param("mpi", "whole", marks=pytest.mark.mpi),
        ("torchrun", "whole"),
        ("hocket", "lora"),
        ("hocket", "dpo"),
    ],
)
def test_a_trainer_of_trl_s(launcher: str, kind: str, tmp_path: Path) -> None:
    """Two ranks with half the batch end where TRL's trainer does alone, as do a resumed run and the saved model."""
    whole, resumed, saved = weights(tmp_path, LAUNCHERS[launcher], kind, "4", "sgd")
    assert whole == resumed == saved
    [alone] = weights(tmp_path, [], kind, "8")
    assert whole == pytest.approx(alone, abs=1e-6)


@pytest.mark.full
@of_trl
def test_a_trainer_of_trl_s_that_generates(tmp_path: Path) -> None:
    """GRPO's groups are those of DistributedDataParallel's ranks."""
    whole, resumed, saved = weights(tmp_path, LAUNCHERS["hocket"], "grpo", "4", "sgd")
    assert whole == resumed == saved
    [by_ddp] = weights(tmp_path, LAUNCHERS["torchrun"], "grpo", "4")
    assert whole == pytest.approx(by_ddp, abs=1e-6)


@pytest.mark.full
@of_trl
def test_a_trainer_of_trl_s_with_an_outer_optimizer_is_resumed(tmp_path: Path) -> None:
    whole, resumed, saved = weights(
        tmp_path, LAUNCHERS["hocket"], "whole", "4", "diloco", "parameters.0.every=2"
    )
    assert whole == resumed == saved
