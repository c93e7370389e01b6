"""A script with a Trainer under the launchers that people use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nets import Net, looped, on_ranks

SCRIPT = str(Path(__file__).parent / "train.py")
HOCKET = (sys.executable, "-m", "hocket", "launch", "-n", "2", "--transport", "torch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def started(
    command: tuple[str, ...], *arguments: str, code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*command, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("launcher", [HOCKET, pytest.param(TORCHRUN, marks=pytest.mark.full)])
def test_launched_ranks_train_as_virtual_ones(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    started(launcher, str(tmp_path), "sgd")
    for rank, weights in enumerate(on_ranks(lambda: looped(Net(), "sgd"))):
        assert torch.equal(torch.load(tmp_path / f"rank-{rank}-of-2.pt"), weights)
    assert len(list(tmp_path.rglob("version_*"))) == 1  # rank 0 alone logs


IMPORTS = """
from hocket_lightning import HocketStrategy
import {module}
trainer = {module}.Trainer(strategy=HocketStrategy("sgd"), accelerator="cpu", logger=False)
print(type(trainer.strategy).__mro__[2].__module__.split(".")[0])
"""


@pytest.mark.full
@pytest.mark.parametrize("module", ["lightning", "pytorch_lightning"])
def test_the_strategy_is_of_the_distribution_that_the_script_uses(module: str) -> None:
    command = [sys.executable, "-c", IMPORTS.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    assert done.stdout.split() == [module], done.stderr


@pytest.mark.full
def test_one_rank_with_more_devices_says_how_to_start_them(tmp_path: Path) -> None:
    alone = started((sys.executable,), str(tmp_path), "sgd", code=1).stderr
    assert f"`hocket launch -n 2 {Path(SCRIPT).name}` does" in alone


@pytest.mark.full
def test_a_misspelt_strategy_is_said_by_rank_0(tmp_path: Path) -> None:
    told = started(HOCKET, str(tmp_path), "dilocco", code=2).stderr
    assert "hocket: rank 0: there is no recipe 'dilocco'" in told
    assert "Traceback" not in told


@pytest.mark.full
def test_ranks_of_srun(tmp_path: Path) -> None:
    """The variables of a step of srun's, as Slurm sets them; no Slurm."""
    step = {"JOB_ID": os.getpid(), "STEP_ID": 0, "STEP_NUM_TASKS": 2, "STEP_NODELIST": "localhost"}
    ranks = []
    for rank in range(2):
        own = {**step, "PROCID": rank, "LOCALID": rank, "NTASKS": 2, "NTASKS_PER_NODE": 2}
        variables = {f"SLURM_{name}": str(value) for name, value in own.items()}
        command = [sys.executable, SCRIPT, str(tmp_path), "sgd"]
        ranks.append(subprocess.Popen(command, env={**os.environ, **variables}))
    assert [rank.wait(115) for rank in ranks] == [0, 0]
    for rank, weights in enumerate(on_ranks(lambda: looped(Net(), "sgd"))):
        assert torch.equal(torch.load(tmp_path / f"rank-{rank}-of-2.pt"), weights)
