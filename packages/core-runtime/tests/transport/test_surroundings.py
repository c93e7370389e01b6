"""Environments as they are: no HOME, an mpi4py that cannot be loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.launch import launching
from hocket.launch.mpi_there import why_no_mpi4py
from hocket.launch.rank_process import home, variables_of_ranks


def test_ranks_have_a_home_where_the_environment_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    assert home() == {}
    assert variables_of_ranks(1)["HOME"] == "/somebody"
    monkeypatch.delenv("HOME")
    assert Path(home()["HOME"]).is_dir()
    assert variables_of_ranks(1)["HOME"] == home()["HOME"]
    monkeypatch.setattr("os.path.expanduser", lambda path: str(tmp_path / "nowhere"))
    assert Path(home()["HOME"]).is_dir()


def in_a_process(code: str, cwd: Path, files: tuple[int, int] | None = None) -> tuple[int, str]:
    limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, {files})" if files else ""
    ended = subprocess.run(
        [sys.executable, "-c", f"import os, resource, sys\n{limit}\n{code}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stderr


def test_a_small_limit_of_files_is_raised_as_far_as_the_system_lets_it(tmp_path: Path) -> None:
    code = (
        "from hocket.launch.rank_process import allow_files\n"
        "from hocket.errors import UserError\n"
        "try: allow_files(4)\n"
        "except UserError as error: sys.exit(str(error))\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 80"
    )
    assert in_a_process(code, tmp_path, (40, 100)) == (0, "")
    status, told = in_a_process(code, tmp_path, (40, 60))
    assert status == 1
    assert told == (
        "a process of a job of 4 ranks opens up to 80 files and connections, but this one may open 60: "
        "raise the limit with `ulimit -n 80` before the command, or in /etc/security/limits.conf\n"
    )


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = f"os.chdir('{tmp_path}/gone'); os.rmdir('../gone'); sys.argv = ['hocket', 'plugins']\n"
    code += "from hocket.cli.main import main; main()"
    status, told = in_a_process(code, tmp_path)
    assert (status, told) == (
        2,
        "hocket: the working directory no longer exists (No such file or directory): cd to another one\n",
    )


@pytest.mark.parametrize("raised", ["ImportError('no libmpi')", "RuntimeError('no libmpi')"])
def test_an_mpi4py_that_does_not_import_leaves_transport_torch(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    why_no_mpi4py.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert launching.usable_mpiexec() is None
        kind = raised.partition("(")[0]
        assert why_no_mpi4py() == f"{kind}: no libmpi"
        assert [record.message for record in caplog.records] == [
            f"mpi4py is installed but cannot be imported ({kind}: no libmpi): ranks use transport torch; "
            "`hocket doctor` says more"
        ]
    finally:
        why_no_mpi4py.cache_clear()
