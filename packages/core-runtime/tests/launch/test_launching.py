"""Finding an mpiexec and starting ranks with it; how jobs end is in `tests/endings`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.errors import UserError
from hocket.installing import how_to_install
from hocket.launch import launching
from hocket.launch.launching import launch
from hocket.launch.mpiexec import Mpiexec, find_mpiexec
from hocket.launch.rank_process import threads_per_rank
from hocket.transport.job_notes import (
    PID_FOLDER_VARIABLE,
    note_host,
    note_leaving,
    note_pid,
    noted_pids,
    processes_of,
)

PYTHON = sys.executable


def fake(folder: Path, says: str) -> Path:
    program = folder / "mpiexec"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the only one on PATH, with a Python that has no mpiexec beside it."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}")
    monkeypatch.setattr(shutil, "which", lambda name: _which(tmp_path / "bin" / name))
    return tmp_path / "bin"


def _which(path: Path) -> str | None:
    return str(path) if path.exists() else None


def test_without_mpiexec_the_message_says_what_to_install(elsewhere: Path) -> None:
    install = re.escape(how_to_install("hocket-core", "mpi"))
    with pytest.raises(UserError, match=rf"^no mpiexec found: {install} installs one, or use"):
        find_mpiexec()


@pytest.mark.parametrize(
    ("says", "vendor", "version"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs", "openmpi", "mpiexec (Open MPI) 5.0.11"),
        ("HYDRA build details:\n    Version:           5.0.2\n", "mpich", "MPICH 5.0.2"),
    ],
)
def test_the_two_vendors(says: str, vendor: str, version: str, elsewhere: Path) -> None:
    program = fake(elsewhere, says)
    assert find_mpiexec() == Mpiexec(str(program), vendor, version)


def test_another_mpiexec_is_refused_by_what_it_says(elsewhere: Path) -> None:
    program = fake(elsewhere, "Intel(R) MPI Library")
    with pytest.raises(UserError, match=rf"^{program} is neither Open MPI's nor MPICH's mpiexec \(Intel"):
        find_mpiexec()


def test_the_one_beside_this_python_comes_first(elsewhere: Path) -> None:
    fake(elsewhere, "mpiexec (Open MPI) 4")
    beside = Path(sys.executable).parent
    beside.mkdir()
    program = fake(beside, "mpiexec (Open MPI) 5")
    assert find_mpiexec().path == str(program)


@pytest.mark.parametrize(
    ("vendor", "version", "tells"),
    [
        ("openmpi", "mpiexec (Open MPI) 5.0.11", True),
        ("openmpi", "mpiexec (Open MPI) 4.1.6", False),
        ("mpich", "MPICH 5.0.2", False),
    ],
)
def test_ulfm_is_asked_for_where_it_is(vendor: str, version: str, tells: bool) -> None:
    mpiexec = Mpiexec("/mpiexec", vendor, version)
    assert mpiexec.notifies_of_deaths is tells
    assert ("ulfm" in mpiexec.command(2, ["a"], outliving=True)) is tells
    assert "ulfm" not in mpiexec.command(2, ["a"])


def test_the_launchers_files_are_kept_apart_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mpiexec = Mpiexec("/mpiexec", "openmpi", "")
    assert str(tmp_path) in mpiexec.command(2, ["a"], folder=tmp_path)
    assert str(tmp_path) not in Mpiexec("/mpiexec", "mpich", "").command(2, ["a"], folder=tmp_path)
    monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", "/scratch")
    assert mpiexec.command(2, ["a"], folder=tmp_path) == mpiexec.command(2, ["a"])


@pytest.mark.mpi
def test_a_job_starts_where_a_killed_one_has_left_its_files(tmp_path: Path) -> None:
    # Named as the process that is to become mpiexec: its number is the shell's.
    leave = 'mkdir -p "$TMPDIR/ompi.$$"; touch "$TMPDIR/ompi.$$/pmix.$(hostname).tool.$$"'
    leave += '; touch "$TMPDIR/ompi.$$/pmix.$(hostname).tool"; exec "$0" "$@"'
    command = find_mpiexec().command(2, ["true"], folder=tmp_path / "own")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run(["sh", "-c", leave, *command], env=environment, check=True)


def test_root_and_more_ranks_than_cores_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    mpiexec = Mpiexec("/mpiexec", "openmpi", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mpiexec.command(2, ["a", "b"]) == [
        *("/mpiexec", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-n", "2", "a", "b")
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in mpiexec.command(2, ["a"])
    assert Mpiexec("/mpiexec", "mpich", "").command(3, ["a"]) == [
        "/mpiexec",
        "-bind-to",
        "none",
        "-n",
        "3",
        "a",
    ]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]


def test_a_rank_leaves_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PID_FOLDER_VARIABLE, raising=False)
    note_pid(2)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(PID_FOLDER_VARIABLE, str(tmp_path))
    note_pid(2)
    assert (tmp_path / str(os.getpid())).read_text() == "2"


def test_a_rank_on_another_host_leaves_nothing_in_a_folder_that_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PID_FOLDER_VARIABLE, str(tmp_path))
    note_host(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    note_pid(2)
    note_leaving()
    assert noted_pids(tmp_path) == []
    monkeypatch.setenv(PID_FOLDER_VARIABLE, str(tmp_path / "absent"))
    note_pid(2)


def test_a_job_passes_on_what_it_prints(
    elsewhere: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = elsewhere / "mpiexec"
    program.write_text(
        '#!/bin/sh\necho "out $OMP_NUM_THREADS $HOCKET_PID_FOLDER $MORE"; echo err >&2; exit 3\n'
    )
    program.chmod(0o755)
    mpiexec = Mpiexec(str(program), "mpich", "")
    assert (
        launch(mpiexec, 1000, ["x"], folder=tmp_path, environment={"MORE": "more", "OMP_NUM_THREADS": "1"})
        == 3
    )
    assert capfd.readouterr() == (
        f"out 1 {tmp_path} more\n",
        "err\nhocket: the ranks ended with exit code 3, without an error message\n",
    )


def test_ranks_that_were_all_killed_may_have_run_out_of_memory(
    elsewhere: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = elsewhere / "mpiexec"
    program.write_text("#!/bin/sh\nexit 137\n")
    program.chmod(0o755)
    assert launch(Mpiexec(str(program), "mpich", ""), 2, ["x"], folder=tmp_path) == 137
    assert capfd.readouterr().err == (
        "hocket: the ranks were killed by SIGKILL (exit code 137), without an error message: out of memory? See "
        "the kernel's log\n"
    )


def test_a_launcher_that_does_not_end_the_job_is_killed(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "_TERMINATION_TIMEOUT_S", 1.0)
    # What a rank does in `end_job`, but for the call that Open MPI's launcher once did not heed.
    program = (
        "from hocket.transport.job_notes import note_ending; import time; note_ending(3); time.sleep(600)"
    )
    launcher = elsewhere / "mpiexec"
    launcher.write_text('#!/bin/sh\ntrap "" TERM\nshift 4\n"$@"\n')  # -bind-to none -n 1
    launcher.chmod(0o755)
    begun_s = time.monotonic()
    assert launch(Mpiexec(str(launcher), "mpich", ""), 1, [PYTHON, "-c", program], folder=tmp_path) == 3
    assert time.monotonic() - begun_s < 60
    assert "hocket: mpiexec did not end the job within 1 s, and was killed" in capfd.readouterr().err
    assert processes_of(tmp_path) == []


@pytest.mark.mpi
def test_a_rank_that_outlives_a_dead_one_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "_OUTLIVING_TIMEOUT_S", 1.0)
    # The other one never looks at whom it has lost.
    program = (
        "import os, signal, time; from hocket.transport.job_notes import note_pid; from mpi4py import MPI;"
        "rank = MPI.COMM_WORLD.rank; note_pid(rank); MPI.COMM_WORLD.Barrier();"
        "rank and os.kill(os.getpid(), signal.SIGKILL); time.sleep(600)"
    )
    begun_s = time.monotonic()
    assert launch(find_mpiexec(), 2, [PYTHON, "-c", program], folder=tmp_path) == 137
    assert time.monotonic() - begun_s < 60
    assert "hocket: rank 1 on " in (told := capfd.readouterr().err)
    assert " was killed by SIGKILL" in told
    assert processes_of(tmp_path) == []


def test_a_launcher_that_takes_no_notice_of_a_rank_that_ended(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As it waits for what holds the rank's output open, such as a worker of a data loader that hangs."""
    monkeypatch.setattr(launching, "_OUTLIVING_TIMEOUT_S", 600.0)
    monkeypatch.setattr(launching, "_ORPHANED_TIMEOUT_S", 0.0)
    monkeypatch.setattr(launching, "_TERMINATION_TIMEOUT_S", 1.0)
    program = "from hocket.transport.job_notes import note_pid; note_pid(0)"
    launcher = elsewhere / "mpiexec"
    launcher.write_text('#!/bin/sh\ntrap "" TERM\nshift 4\n"$@" &\nexec sleep 600\n')
    launcher.chmod(0o755)
    begun_s = time.monotonic()
    assert launch(Mpiexec(str(launcher), "mpich", ""), 1, [PYTHON, "-c", program], folder=tmp_path) == 137
    assert time.monotonic() - begun_s < 60
    assert "hocket: mpiexec did not end the job within 1 s, and was killed" in capfd.readouterr().err
