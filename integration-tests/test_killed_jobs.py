"""Jobs of real MPI ranks, one of which is killed at a random moment; each goes on to the uninterrupted run's numbers.

HOCKET_MPI_KILLS says how many; 200 take about an hour on two cores.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import killed_job
import killed_launcher
import numpy as np
import pytest

import hocket
from hocket.checkpoint.folder import newest_first
from hocket.errors import CheckpointError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

NUM_KILLS = int(os.environ.get("HOCKET_MPI_KILLS", "1"))
LONGEST_S = 90.0

#: Other jobs of this machine use its shared memory meanwhile: ours has one of its own, where that is allowed.
OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && "$@"; rc=$?; ls -A /dev/shm > "$LEFT"; exit $rc', "sh"]  # fmt: skip # noqa: E501


@cache
def owns_memory() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*OWN_MEMORY, "true"], env={**os.environ, "LEFT": "/dev/null"}, check=False)
    return tried.returncode == 0


@cache
def undisturbed(strategy: str) -> list[Any]:
    """Return the ranks' parameters in the end, from virtual ranks, which sum in the same order."""
    return hocket.virtual(killed_job.RANKS).run(killed_job.trained, strategy, None)


class Job:
    """A job with folders of its own.

    Args:
        folder: of the run, with its checkpoints.
    """

    def __init__(self, folder: Path, strategy: str) -> None:
        self._temporary, self._left = folder / "temporary", folder / "left"
        self._temporary.mkdir(exist_ok=True)
        self._output = folder / "output.txt"
        rank = [killed_job.__file__, str(folder), strategy]
        command = [sys.executable, killed_launcher.__file__, str(killed_job.RANKS), *rank]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*(OWN_MEMORY if owns_memory() else []), *command],
                env={
                    **os.environ,
                    "PYTHONFAULTHANDLER": "1",
                    "TMPDIR": str(self._temporary),
                    "LEFT": str(self._left),
                    "JOB": str(folder),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._mark = f"JOB={folder}".encode()

    def ranks(self) -> list[int]:
        """Return the process numbers of the ranks that live."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                is_rank = any(variable.startswith(b"OMPI_COMM_WORLD_RANK=") for variable in variables)
                if is_rank and self._mark in variables:
                    found.append(int(process.name))
        return sorted(found)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Wait for the job's end, check that nothing is left of it, and return its exit status."""
        try:
            status = self._process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self._show_stacks()
            os.killpg(self._process.pid, signal.SIGKILL)
            raise AssertionError(f"the job hangs:\n{self.output}") from None
        assert self._ranks_end(LONGEST_S), "ranks outlive their job"
        # torch leaves an empty folder of its own.
        assert [name for name in os.listdir(self._temporary) if not name.startswith("torch")] == []
        if owns_memory():
            assert self._left.read_text() == ""
        return status

    def _show_stacks(self) -> None:
        """Have Python's fault handler write where each rank is; ends them."""
        for rank in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGABRT)
        self._ranks_end(LONGEST_S)

    def _ranks_end(self, seconds: float) -> bool:
        """Return whether all ranks end within so many seconds."""
        deadline_s = time.monotonic() + seconds
        while self.ranks():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.05)
        return True

    @property
    def output(self) -> str:
        return self._output.read_text()[-20000:]


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_rank_is_killed_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    strategy = sorted(killed_job.STRATEGIES)[seed % len(killed_job.STRATEGIES)]
    job = Job(tmp_path, strategy)
    is_early = draw.random() < 0.2
    wait_for(job, lambda: bool(job.ranks()) if is_early else len(list(tmp_path.glob("joined-*"))) == 4)
    time.sleep(draw.uniform(0, 3.0))
    ranks = job.ranks()
    if ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(ranks), signal.SIGKILL)
    status = job.end()
    told = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("told-step-*")]
    try:
        newest = int(newest_first(tmp_path / "checkpoints")[0].name.rpartition("-")[2])
    except CheckpointError:
        newest = 0
    assert newest >= max(told, default=0), f"a checkpoint is lost:\n{job.output}"
    for rank, (found, expected) in enumerate(
        zip(ended(tmp_path, strategy, status, seed), undisturbed(strategy), strict=True)
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=f"rank {rank}, {strategy}")


def ended(folder: Path, strategy: str, status: int, seed: int) -> list[Any]:
    """Return the ranks' parameters in the end, of a job that goes on if the first has failed.

    Every fifth goes on under mpiexec, with each strategy in turn; the others, as the first, on virtual ranks, which
    start sooner.
    """
    if status != 0 and seed % 5 != 1:
        return hocket.virtual(killed_job.RANKS).run(killed_job.trained, strategy, folder / "checkpoints")
    if status != 0:
        again = Job(folder, strategy)
        assert again.end() == 0, again.output
    return [np.load(folder / f"{rank}.npy") for rank in range(killed_job.RANKS)]


def wait_for(job: Job, there: Any) -> None:
    deadline_s = time.monotonic() + LONGEST_S
    while job.lives and not there():
        assert time.monotonic() < deadline_s, job.output
        time.sleep(0.02)
