"""`hocket new plugin`: what it writes installs, passes its conformance suites and trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.cli.new import write_plugin
from hocket.errors import UserError


def run(folder: Path, *command: str, path: Path | None = None) -> str:
    paths = [str(path)] if path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.timeout(400)
def test_a_new_plugin_passes_its_tests_as_it_is_written(tmp_path: Path) -> None:
    told = run(tmp_path, "hocket", "new", "plugin", "my_own")
    folder = tmp_path / "hocket-my-own"
    assert "cd hocket-my-own" in told
    assert not [path for path in folder.rglob("*") if "WORD" in path.name or path.suffix == ".txt"]
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not any("WORD" in text or "CORE" in text for text in texts)
    site = tmp_path / "site"
    # As pip installs it, but beside this environment.
    alone = ("--no-build-isolation", "--no-deps", "--no-index")
    run(folder, "pip", "install", "--quiet", *alone, "--target", str(site), ".")
    passed = run(folder, "pytest", "-q", "-p", "no:cacheprovider", path=site)
    assert " passed" in passed
    assert "skipped" not in passed


@pytest.mark.parametrize("word", ["", "My", "a-b", "2nd", "a__b", "redsync"])
def test_a_name_that_cannot_be_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name"):
        write_plugin(word, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write_plugin("mine", tmp_path)
    (folder / "README.md").write_text("my own words")
    with pytest.raises(UserError, match="exists already: choose another name"):
        write_plugin("mine", tmp_path)
    assert (folder / "README.md").read_text() == "my own words"
