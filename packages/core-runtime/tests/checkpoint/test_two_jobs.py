"""Two jobs and one folder: a checkpoint is of one of them, and what was reported as saved stays as it was."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from saving_job import Told, attached, cannot_lock, load, save
from training import Training, on_ranks

import hocket
from hocket.checkpoint import folder as folders
from hocket.disk import LOCK, locked
from hocket.errors import CheckpointError

_JOB = Path(__file__).parent / "saving_job.py"


@pytest.fixture
def no_locks() -> Iterator[None]:
    cannot_lock(True)
    yield
    cannot_lock(False)


def both(folder: Path, *options: str) -> tuple[list[str], str]:
    """Let job A save, and job B, another process, while rank 1 of A is at it; return what they say."""
    said = []

    def other_job() -> None:
        done = subprocess.run(
            [sys.executable, str(_JOB), str(folder), *options], capture_output=True, text=True, check=True
        )
        said.append(done.stdout.strip())

    def of_rank() -> str:
        return save(folder, Told("A", other_job if hocket.join().rank == 1 else None))

    return hocket.virtual(2).run(of_rank), said[0]


def jobs_of(path: Path) -> list[str]:
    return hocket.virtual(2).run(lambda: load(path))


def test_a_living_job_keeps_others_out(tmp_path: Path) -> None:
    said, of_b = both(tmp_path)
    assert said == ["step-00000000"] * 2
    assert re.fullmatch(
        rf"another job is saving into {tmp_path} \(run [0-9a-f]{{12}}, process {os.getpid()} on .+\): a folder can "
        r"hold the checkpoints of one job only. Save to another folder, or end the other job",
        of_b,
    )
    assert os.listdir(tmp_path) == said[:1]
    assert jobs_of(tmp_path) == ["A", "A"]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_each_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    said, of_b = both(tmp_path, "cannot-lock")
    assert (of_b, said) == ("step-00000000", ["step-00000000.1"] * 2)
    assert sorted(os.listdir(tmp_path)) == [of_b, said[0]]
    assert jobs_of(tmp_path / of_b) == ["B", "B"]
    assert jobs_of(tmp_path / said[0]) == ["A", "A"]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_what_another_job_left_stays(tmp_path: Path) -> None:
    """Nobody can tell whether that job lives."""
    with folders.begin(tmp_path, 1, "b") as path:
        on_ranks(1, Training(("local",)), save=(tmp_path, [1]), stop=1)
        assert path.is_dir()
        assert folders.finish(path).name == "step-00000001.1"


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from hocket.checkpoint import folder
with folder.begin(Path({str(tmp_path)!r}), 3, "b") as path:
    (path / "rank-0000.safetensors.hocket-tmp").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [LOCK, "step-00000003-b.unfinished"]
    on_ranks(2, Training(("local",)), save=(tmp_path, [3]), stop=3)
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_a_lock_that_is_removed_is_none(tmp_path: Path) -> None:
    """Who waits at a file that its holder removes does not hold what the next one locks."""
    with locked(tmp_path, "a"):
        (tmp_path / LOCK).unlink()
        with locked(tmp_path, "b") as is_locked:
            assert is_locked
            with pytest.raises(CheckpointError, match=r"\(run b, process"), locked(tmp_path, "c"):
                pass


def test_jobs_that_take_turns(tmp_path: Path) -> None:
    """Whoever comes back to a folder that has another job's checkpoints by now is told, and nothing is lost."""
    with attached() as one, attached() as other:
        assert [session.save(tmp_path).name for session in (one, one, other)] == [
            "step-00000000",
            "step-00000000.1",
            "step-00000000.2",
        ]
        with pytest.raises(
            CheckpointError,
            match=r"^another job has saved .*/step-00000000.2 since this one saved step-00000000.1: a folder can hold",
        ):
            one.save(tmp_path)
        other.save(tmp_path)
        one.save(tmp_path / "own")
    assert len(folders.complete(tmp_path)) == 4


def test_files_of_two_runs(tmp_path: Path) -> None:
    """Whatever has mixed them: each rank's file is compared with the manifest, and the newest whole one is taken."""
    for _ in "AB":
        hocket.virtual(2).run(lambda: save(tmp_path, Told("A")))
    name = "rank-0001.safetensors"
    shutil.copy(tmp_path / "step-00000000" / name, tmp_path / "step-00000000.1" / name)
    with pytest.raises(
        CheckpointError,
        match=r"^rank 1: .*0.1/rank-0001.safetensors is of run [0-9a-f]{12}, and .*manifest.json of run [0-9a-f]{12}: "
        "two jobs",
    ):
        jobs_of(tmp_path / "step-00000000.1")
    assert jobs_of(tmp_path / "step-00000000") == jobs_of(tmp_path) == ["A", "A"]


def test_a_fork_holds_no_lock_of_its_parent(tmp_path: Path) -> None:
    """A loader's worker, begun during a save beside training, may outlive a process that is killed."""
    program = f"""
import errno
import os
from pathlib import Path
from hocket.disk import locked
with locked(Path({str(tmp_path)!r}), "a"):
    if os.fork() == 0:
        held = [Path("/proc/self/fd", str(each)) for each in range(20)]
        print([os.readlink(path) for path in held if path.exists()])
        os._exit(0)
    print(os.wait()[1], flush=True)
"""
    ended = subprocess.run([sys.executable, "-u", "-c", program], check=True, capture_output=True, text=True)
    assert ended.stdout.endswith("0\n")
    assert LOCK not in ended.stdout


def test_a_disk_that_is_too_full_for_a_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hocket.disk.os.write", full)
    [said] = hocket.virtual(1).run(lambda: save(tmp_path, Told("A")))
    assert said == f"{tmp_path / LOCK}: No space left on device"
