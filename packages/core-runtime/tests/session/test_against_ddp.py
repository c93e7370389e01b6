"""The session against DistributedDataParallel: some steps, equal to rounding, the same bits on all ranks."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

import ddp_cases
import pytest

from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.launch.own_ranks import OwnRanks

pytestmark = pytest.mark.timeout(240)

#: Ranks under mpiexec do not share the start of one process.
MPI = [
    pytest.mark.mpi,
    pytest.mark.full,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


@pytest.fixture(scope="module", params=["torch", pytest.param("mpi", marks=MPI)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one job; return what each rank found in each case, and the job's status."""
    folder = tmp_path_factory.mktemp("ddp")
    results = folder / "results.json"
    status = launch(
        OwnRanks() if request.param == "torch" else find_mpiexec(),
        ddp_cases.RANKS,
        [sys.executable, ddp_cases.__file__, str(folder / "store"), str(results)],
        folder=folder,
        environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        ready=lambda: None,
    )
    return {"told": json.loads(results.read_text()) if results.exists() else {}, "status": status}


@pytest.mark.parametrize("name", ddp_cases.CASES)
def test_case(job: dict[str, Any], name: str) -> None:
    assert name in job["told"], f"the job ended with {job['status']} before this case"
    told = job["told"][name]
    assert len(told) == ddp_cases.RANKS
    wrong = [line for rank in told for line in rank["wrong"]]
    assert not wrong, "\n".join(wrong)


def test_job_ends_well(job: dict[str, Any]) -> None:
    assert job["status"] == 0
