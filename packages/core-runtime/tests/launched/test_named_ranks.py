"""Libraries on torch.distributed find the ranks of launchers that set other variables than torchrun's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HERE, ended

import hocket
from hocket.launch.torch_variables import missing_variables
from hocket.transport.launchers import Launched
from hocket.transport.meeting import Rendezvous
from hocket.transport.peer import Peer
from hocket.transport.virtual import current_peer

SCRIPT = str(HERE / "named_rank.py")


def named(found: Launched, environment: dict[str, str]) -> list[dict[str, str]]:
    def own() -> dict[str, str]:
        peer: Peer | None = current_peer()
        assert peer is not None
        return missing_variables(found, peer, environment)

    return hocket.virtual(3).run(own)


def test_ranks_of_one_host_meet_at_rank_0s_port() -> None:
    ranks = named(Launched("mpiexec", 0, 3), {})
    assert [each["RANK"] for each in ranks] == [each["LOCAL_RANK"] for each in ranks] == ["0", "1", "2"]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in ranks} == {("3", "3")}
    [(host, port)] = {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks}
    assert host == "127.0.0.1"
    assert 0 < int(port) < 1 << 16


def test_they_meet_where_the_launcher_says_and_keep_what_it_sets() -> None:
    there = Rendezvous(0, 3, "a", 7000, "hocket")
    for rank in named(Launched("srun", 0, 3, rendezvous=there), {"LOCAL_RANK": "9"}):
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("a", "7000")
        assert "LOCAL_RANK" not in rank


@pytest.mark.mpi
def test_mpiexec(tmp_path: Path) -> None:
    job = ended([sys.executable, "-m", "hocket", "launch", "-n", "2", "--transport", "mpi", SCRIPT], tmp_path)
    assert (job.returncode, job.stdout) == (0, "right\n"), job.stderr


def test_srun() -> None:
    step = {"JOB_ID": str(os.getpid()), "STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost"}
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **{f"SLURM_{name}": value for name, value in step.items()},
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT],
            env={**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [(rank.communicate(timeout=100)[0], rank.returncode) for rank in ranks] == [
        ("right\n", 0),
        ("", 0),
    ]
