"""Recipes and some cells over real MPI, in one job: the same numbers as the reference, the bytes as planned.

CI has every other recipe, the full set all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpi_rank
import numpy as np
import pytest
from checks import check_numbers
from matrix import accepted, is_repeatable, recipes, shorter_periods
from trial import Run, Toy

import hocket
from hocket.launch.mpiexec import find_mpiexec
from hocket.plan.plan import plan
from hocket.transport.network import NetworkModel

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

RANKS = 4

#: A multiple of the intervals and periods of all recipes.
STEPS = 8

#: One for each way of moving bytes: the transport's collectives, schedules, messages, groups, what is hidden.
CELLS = (
    "gradients-allreduce-none-hierarchy",
    "gradients-allreduce-none-sharded_leaders",
    "gradients-allreduce+ring-none-world-backward",
    "gradients-allreduce+recursive_doubling-shared_random-world",
    "gradients-reduce-none-hierarchy",
    "gradients-sparse_allreduce-error_feedback+topk-world-backward",
    "gradients-sparse_allreduce-momentum_correction+error_feedback+topk-world",
    "gradients-sparse_allreduce-bf16-leaders",
    "gradients-gossip-complete-topk-world",
    "parameters-gossip-random_matching-shared_random-world-forward",
    "parameters-gossip-complete-bf16-sharded_leaders",
    "parameters-gossip+push_sum-irregular_directed-none-world-delay",
)

_JOB_TIMEOUT_S = 150


def targets() -> dict[str, list[Any]]:
    """Return the arguments of `hocket.compose`, by name."""
    cells = {cell.id: cell.config for slot in ("gradients", "parameters") for cell, _ in accepted(slot)}
    names = recipes() if os.environ.get("HOCKET_CELLS") == "all" else recipes()[::2]
    whole = {name: [name, *shorter_periods(name, STEPS)] for name in names}
    return whole | {name: [cells[name]] for name in CELLS}


TARGETS = targets()


@dataclass(frozen=True)
class Job:
    """A job that has ended: its folder, its exit status and the end of its output."""

    folder: Path
    status: int
    output: str


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "strategies.json").write_text(json.dumps(list(TARGETS.values())))
    program = [sys.executable, mpi_rank.__file__, str(folder), str(STEPS)]
    with (folder / "output.txt").open("w") as output:
        ended = subprocess.run(
            find_mpiexec().command(RANKS, program, folder=folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=_JOB_TIMEOUT_S,
            check=False,
        )
    return Job(folder, ended.returncode, (folder / "output.txt").read_text()[-4000:])


@pytest.mark.parametrize("name", TARGETS)
def test_case(job: Job, name: str) -> None:
    told = job.folder / f"{list(TARGETS).index(name)}.json"
    assert told.exists(), f"the job ended with {job.status} before this case:\n{job.output}"
    run, strategy = read(told), hocket.compose(*TARGETS[name])
    check_numbers(strategy, run)
    if is_repeatable(strategy):
        planned = plan(strategy, Toy(), RANKS, NetworkModel()).bytes_per_step
        assert run.counted_bytes == pytest.approx(planned, rel=1e-9)


def read(path: Path) -> Run:
    of_ranks: list[Any] = json.loads(path.read_text())
    parameters, losses, nbytes = zip(*of_ranks, strict=True)
    return Run(np.array(parameters), np.array(losses), sum(nbytes) / len(nbytes) / STEPS, 0.0)


def test_job_ends_well(job: Job) -> None:
    assert job.status == 0, job.output
