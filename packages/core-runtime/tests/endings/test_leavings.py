"""A killed job leaves nothing, in shared memory or in the temporary folder."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.transport.job_folder import job_folder

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("afresh")]  # processes are found by their commands

HERE = Path(__file__).parent
LONGEST_S = 60.0
RANKS = 2

needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
# Other jobs of the machine use its shared memory meanwhile, so that ours is one of its own, where that is allowed.
OWN_MEMORY = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none /dev/shm && "$@"; ls -A /dev/shm > "$LEFT"',
    "sh",
]


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run([*OWN_MEMORY, "true"], env={**os.environ, "LEFT": "/dev/null"}, check=False).returncode
        == 0
    )


class Killed:
    """A job with folders of its own, of which a process is killed.

    Args:
        folder: for everything that is asked about later.
    """

    def __init__(self, folder: Path) -> None:
        self.temporary, self._left, self._ready = folder / "tmp", folder / "left", folder / "ready"
        for new in (self.temporary, self._ready):
            new.mkdir()
        rank = [sys.executable, str(HERE / "rank.py"), "large", "none", "60", str(self._ready)]
        command = [sys.executable, str(HERE / "job.py"), "mpi", str(RANKS), "-", *rank]
        self._own_memory = can_unshare()
        self._before = set(os.listdir("/dev/shm"))
        self._process = subprocess.Popen(
            [*(OWN_MEMORY if self._own_memory else []), *command],
            env={**os.environ, "TMPDIR": str(self.temporary), "LEFT": str(self._left), "JOB": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._mark = f"JOB={folder}".encode()

    def processes(self, kind: str, *, ranks: bool) -> list[int]:
        """The job's processes with this word in their command; ranks, or others."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                is_rank = any(variable.startswith(b"OMPI_COMM_WORLD_RANK=") for variable in variables)
                command = (folder / "cmdline").read_bytes().split(b"\0")
                if (
                    self._mark in variables
                    and is_rank == ranks
                    and any(kind.encode() in word for word in command[:2])
                ):
                    found.append(int(folder.name))
        return sorted(found)

    def wait_for(self, kind: str, *, ranks: bool) -> list[int]:
        deadline_s = time.monotonic() + LONGEST_S
        while not (found := self.processes(kind, ranks=ranks)):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return found

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + LONGEST_S
        while len(os.listdir(self._ready)) < RANKS:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def left(self) -> tuple[list[str], list[str]]:
        """Wait for the job's end, and return what lies in the temporary folder and in shared memory."""
        self._process.wait(LONGEST_S)
        deadline_s = time.monotonic() + LONGEST_S
        while self.processes("", ranks=True):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        in_memory = (
            set(self._left.read_text().split())
            if self._own_memory
            else set(os.listdir("/dev/shm")) - self._before
        )
        return sorted(os.listdir(self.temporary)), sorted(in_memory)


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.full) for each in (2, 3, 4))])
def test_a_rank_killed_at_a_random_moment_leaves_nothing(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    job = Killed(tmp_path)
    job.wait_for("rank.py", ranks=True)
    time.sleep(draw.uniform(0, 1.5))
    ranks = job.wait_for("rank.py", ranks=True)
    os.kill(draw.choice(ranks), signal.SIGKILL)
    assert job.left() == ([], [])


@needs_mpi
@pytest.mark.mpi
def test_what_a_killed_launcher_leaves_the_next_job_removes(tmp_path: Path) -> None:
    job = Killed(tmp_path)
    [launcher] = job.wait_for("python", ranks=False)
    job.wait_until_ready()  # before that MPI itself makes folders, which only its launcher removes
    os.kill(launcher, signal.SIGKILL)
    temporary, _ = job.left()
    assert len(temporary) == 1
    with job_folder(job.temporary) as own:
        assert os.listdir(job.temporary) == [own.name]
    assert os.listdir(job.temporary) == []


def test_only_what_dead_jobs_have_made_is_removed(tmp_path: Path) -> None:
    (tmp_path / "hocket-job-results").mkdir()
    (tmp_path / "hocket-job-results" / "precious").touch()
    with job_folder(tmp_path) as living:
        dead = tmp_path / "hocket-job-dead"
        shutil.copytree(living, dead)
        with job_folder(tmp_path) as own:
            assert sorted(os.listdir(tmp_path)) == sorted([living.name, own.name, "hocket-job-results"])
    assert os.listdir(tmp_path) == ["hocket-job-results"]
