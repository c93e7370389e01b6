"""The session against DistributedDataParallel: 20 steps, equal to rounding, the same bits on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp_cases
import pytest

from hocket.transport.mpiexec import find_mpiexec

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

_JOB_TIMEOUT_S = 200


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one job; returns what each rank told of each case, and how the job ended."""
    folder = tmp_path_factory.mktemp("ddp")
    program = [sys.executable, ddp_cases.__file__, str(folder / "store"), str(folder / "results.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = find_mpiexec().command(ddp_cases.RANKS, program, folder=folder)
    with (folder / "output.txt").open("w") as output:
        ended = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=_JOB_TIMEOUT_S,
            check=False,
        )
    told = _read(folder / "results.json")
    return {"told": told, "status": ended.returncode, "output": (folder / "output.txt").read_text()[-4000:]}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("name", ddp_cases.CASES)
def test_case(job: dict[str, Any], name: str) -> None:
    assert name in job["told"], f"the job ended with {job['status']} before this case:\n{job['output']}"
    told = job["told"][name]
    assert len(told) == ddp_cases.RANKS
    wrong = [line for rank in told for line in rank["wrong"]]
    assert not wrong, "\n".join(wrong)


def test_job_ends_well(job: dict[str, Any]) -> None:
    assert job["status"] == 0, job["output"]
