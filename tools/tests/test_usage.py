"""Every script of tools/ answers --help at once, and refuses what it does not take, before it does anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.name for path in TOOLS.iterdir() if path.is_file() and os.access(path, os.X_OK))
#: Scripts whose arguments go to a program that refuses them itself.
PASS_ON = {"bench", "demo", "mechanisms"}


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without a Python that could install anything.
    environment = {**os.environ, "PYTHON": "/nonexistent"}
    command = [str(TOOLS / script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=environment
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_it_says_how_it_is_used(script: str, option: str, tmp_path: Path) -> None:
    ended = run(script, option, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert script in ended.stdout
    assert "set -" not in ended.stdout


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - PASS_ON))
def test_what_it_does_not_take_is_refused(script: str, tmp_path: Path) -> None:
    ended = run(script, "--nonsense", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--nonsense" in ended.stderr or "ACTION" in ended.stderr  # netlab's parser asks for that first
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("setup", ("now",), "'now'"),
        ("types", ("packages",), "'packages'"),
        ("site", ("one", "two"), "'two'"),
        ("wheels", ("one", "two"), "'two'"),
        ("test", ("--quick", "eager"), "'eager'"),
    ],
)
def test_one_argument_too_many_is_named(
    script: str, arguments: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    ended = run(script, *arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert told in ended.stderr
