"""The files of `examples/schedulers/`: their commands, with the variables that each scheduler sets, on one machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = EXAMPLES / "schedulers"
SMALL = ["--samples", "640", "--width", "4"]
#: What starts what a file says, in place of the scheduler's own.
SRUN = """#!/bin/sh
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & started="$started $!"; done
for process in $started; do wait $process || exit 1; done
"""
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def here(text: str, folder: Path) -> str:
    """Return a command of a file with the folders of this machine, in small."""
    text = re.sub(r"(?:/app/)?resnet\.py", str(EXAMPLES / "resnet.py"), text)
    return text.replace("/shared", str(folder)).replace("--strategy agd", f"--strategy agd {' '.join(SMALL)}")


def words(command: list[str], folder: Path) -> list[str]:
    return here(" ".join(command), folder).split()


def started(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def ended(*processes: subprocess.Popen[str]) -> str:
    outputs = [process.communicate(timeout=250)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return "".join(outputs)


def check(folder: Path, output: str) -> None:
    """Two ranks have trained on half of the samples each, and have left a checkpoint."""
    assert output.count("agd: 10 steps") == 1
    assert list((folder / "resnet").glob("step-*/manifest.json"))


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


def in_file(name: str, *keys: Any) -> Any:
    found: Any = yaml.safe_load((FILES / name).read_text())
    for key in keys:
        found = found[key]
    return found


def of_torch(rank: int, port: str) -> Mapping[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_kubeflow_s_trainer(tmp_path: Path) -> None:
    command = words(in_file("trainjob.yaml", "spec", "trainer", "command"), tmp_path)
    pet = {"NNODES": "1", "NODE_RANK": "0", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    pet["MASTER_PORT"] = free_port()
    check(tmp_path, ended(started(command, tmp_path, **{f"PET_{name}": v for name, v in pet.items()})))


def test_kubeflow_s_training_operator(tmp_path: Path) -> None:
    port = free_port()
    pods = ("Master", "Worker")
    keys = ("template", "spec", "containers", 0, "command")
    commands = [in_file("pytorchjob.yaml", "spec", "pytorchReplicaSpecs", pod, *keys) for pod in pods]
    ranks = [
        started(words(command, tmp_path), tmp_path, **of_torch(rank, port))
        for rank, command in enumerate(commands)
    ]
    check(tmp_path, ended(*ranks))


def test_kubeflow_s_mpi_operator(tmp_path: Path) -> None:
    keys = ("spec", "mpiReplicaSpecs", "Launcher", "template", "spec", "containers", 0, "command")
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    command = [
        each.replace("/etc/mpi/hostfile", "hostfile")
        for each in words(in_file("mpijob.yaml", *keys), tmp_path)
    ]
    check(tmp_path, ended(started(command, tmp_path)))


def test_skypilot(tmp_path: Path) -> None:
    script = here(in_file("skypilot.yaml", "run"), tmp_path)
    script = script.replace("--nproc-per-node 4", "--nproc-per-node 2").replace("8008", free_port())
    sky = {"NUM_NODES": "1", "NODE_RANK": "0", "NODE_IPS": "127.0.0.1\n"}
    variables = {f"SKYPILOT_{name}": value for name, value in sky.items()}
    check(tmp_path, ended(started(["sh", "-c", script], tmp_path, **variables)))


def test_slurm(tmp_path: Path) -> None:
    """With variables as srun sets them; no Slurm."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    script = here((FILES / "slurm.sh").read_text(), tmp_path)
    step = {"JOB_ID": str(os.getpid()), "STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost"}
    variables = {f"SLURM_{name}": value for name, value in step.items()}
    check(tmp_path, ended(started(["sh", "-c", script], tmp_path, SLURM_CPUS_PER_TASK="1", **variables)))


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize("strategy", [["agd"], ["diloco", "parameters.0.every=10"]], ids=lambda s: s[0])
def test_ray(tmp_path: Path, strategy: list[str]) -> None:
    script = [sys.executable, str(FILES / "ray_train.py"), "--out", str(tmp_path / "saved")]
    given = ["--strategy", *strategy, "--epochs"]
    first = ended(started([*script, *given, "1"], tmp_path, HOME=str(tmp_path)))
    assert "after 32 steps" in first
    whole = ended(started([*script, *given, "3"], tmp_path, HOME=str(tmp_path)))
    assert "after 96 steps" in whole
