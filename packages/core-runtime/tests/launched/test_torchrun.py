"""Ranks that torchrun has started: they meet over transport `torch`, beside whatever else meets there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from jobs import HERE, TORCHRUN, check_readme, ended


@pytest.mark.full
def test_the_script_of_the_readme(tmp_path: Path) -> None:
    job = ended([*TORCHRUN, "--nproc-per-node", "2", str(HERE / "readme.py"), str(tmp_path)], tmp_path)
    assert job.returncode == 0, job.stderr
    check_readme(tmp_path, 2, "torch")


# With torchrun an agent holds the store; without, rank 0 does, twice at one port.
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2"],
    "hocket": [sys.executable, "-m", "hocket", "launch", "--transport", "torch", "-n", "2"],
}


@pytest.mark.parametrize(
    ("launcher", "first"),
    [
        ("torchrun", []),
        *(pytest.param("hocket", each, marks=pytest.mark.full) for each in ([], ["joined"])),
    ],
)
def test_beside_a_process_group_and_ddp_of_the_users_own(
    launcher: str, first: list[str], tmp_path: Path
) -> None:
    job = ended([*LAUNCHERS[launcher], str(HERE / "beside_ddp.py"), *first], tmp_path)
    assert (job.returncode, job.stdout) == (0, "right\n"), job.stderr


def test_a_restart_goes_on_from_the_last_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    restarting = [*LAUNCHERS["torchrun"], "--max-restarts", "1"]
    for name, launcher in (("whole", LAUNCHERS["hocket"]), ("kill", restarting)):
        (tmp_path / name).mkdir()
        job = ended([*launcher, str(HERE / "restarted.py"), str(tmp_path / name), name], tmp_path)
        assert job.returncode == 0, job.stderr
        assert ("(exitcode: -9) local_rank: 1 " in job.stderr) is (name == "kill")
    for rank in range(2):
        whole, killed = (torch.load(tmp_path / name / f"{rank}.pt") for name in ("whole", "kill"))
        assert whole[0] == killed[0] == 12
        assert all(torch.equal(*pair) for pair in zip(whole[1:], killed[1:], strict=True))


TASK = """
import os, signal
from dataclasses import dataclass
from hocket.task import Digits
from hocket.launch.joining import join

calls = 0

@dataclass(frozen=True)
class Killed(Digits):
    def loss(self, output, target):
        global calls
        calls += 1
        if calls == 8 and join().rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, target)
"""


@pytest.mark.full
def test_a_run_of_hocket_goes_on_where_torchrun_starts_it_again(tmp_path: Path) -> None:
    (tmp_path / "killed_task.py").write_text(TASK)
    run = ["-m", "hocket", "run", "sgd", "steps=12", "log_every=1", "checkpoint.every=3", "--out", "out"]
    job = ended(
        [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", *run, "task=killed_task:Killed"], tmp_path
    )
    assert job.returncode == 0, job.stderr
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 13))
    assert "step 6/" not in job.stdout.rpartition("starting sgd")[2]
