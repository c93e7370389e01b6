"""Standard output whose reader has gone, that is closed or full; and a working directory with modules in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.launch.rank_process import own_python

# Far more than a pipe or a buffer holds, and then what shows that the program has come to its end.
PROGRAM = """
import os, sys
from hocket.cli.streams import keep_streams
keep_streams()
for line in range(20000):
    print("line", line)
sys.stdout.flush()
print("still here", flush=True)
opened = os.open("opened", os.O_WRONLY | os.O_CREAT)
assert opened > 2, opened
os.write(opened, b"ended")
"""


def run(redirected: str, folder: Path) -> tuple[int, str]:
    """Run the program in a shell, and return its status and what stands on standard error."""
    told = folder / "told"
    line = f'{{ "$0" -P -c "$1"; echo $? > status; }} {redirected}'
    with told.open("w") as errors:
        subprocess.run(
            ["bash", "-c", line, sys.executable, PROGRAM],
            cwd=folder,
            stderr=errors,
            timeout=100,
            check=False,
        )
    assert (folder / "opened").read_text() == "ended"
    return int((folder / "status").read_text()), told.read_text()


@pytest.mark.parametrize("redirected", ["| head -1 > /dev/null", ">&-", "<&- >&- 2>&-", "2>&1 | head -1"])
def test_a_reader_that_has_gone_is_no_news(redirected: str, tmp_path: Path) -> None:
    assert run(redirected, tmp_path) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    status, told = run("> /dev/full", tmp_path)
    assert status == 0
    [line] = told.splitlines()
    assert line.startswith("hocket: warning: standard output cannot be written (No space left on device)")


def test_modules_of_the_working_directory_are_not_taken_for_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "copy", "torch", "hocket"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('taken')")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in a program that pip installs
    command = [*own_python(), "-m", "hocket.cli.ranking", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
