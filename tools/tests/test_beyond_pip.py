"""Tests that lack something beyond pip: they are skipped, counted and reported; in CI that is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from hocket.errors import UserError

def test_of_a_text():
    raise UserError("it cannot be read. Install it with `apt install bible-kjv-text`")

@pytest.mark.xfail(raises=UserError, strict=True)
def test_of_another_mistake():
    raise UserError("it cannot be read. Install it with `apt install something-else`")

@pytest.mark.gpu
@pytest.mark.parametrize("case", range(3))
def test_of_a_device(case):
    raise AssertionError("it ran")

@pytest.mark.skip(reason="another reason")
def test_that_is_left_out(): ...
"""


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.full), True])
def test_what_is_not_there_is_told_once(strict: bool, tmp_path: Path) -> None:
    text = (ROOT / "conftest.py").read_text().replace("/usr/lib/bible.data", "/nowhere")
    text = text.replace("torch.cuda.is_available()", "False")
    (tmp_path / "conftest.py").write_text(text)
    (tmp_path / "test_of_mine.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n full\n gpu\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "HOCKET_SKIP"))
    }
    environment |= {
        "PYTHONPATH": str(ROOT / "tools"),
        "HOCKET_SKIPPED": "skipped",
        **({"HOCKET_SKIP_NOTHING": "1"} if strict else {}),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if strict else 0), done.stdout
    assert (
        "not carried out here: 1 for want of bible-kjv-text. They are with: apt install bible-kjv-text"
        in done.stdout
    )
    assert done.stdout.count("left out: 3 tests of GPUs, as torch finds no CUDA device") == 1
    assert (tmp_path / "skipped").read_text() == "bible-kjv-text 1\n"
