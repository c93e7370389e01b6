"""The settings of mypy in pyproject.toml: strict, and torch's types are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

WRONG = """\
import torch

def untyped(x):
    return x

def unknown(x: torch.Tensor) -> list:
    return x.no_such_method()
"""


@pytest.mark.alone  # after `tools/types`, which leaves what mypy knows of torch: a minute of reading
@pytest.mark.timeout(400)
def test_what_has_no_type_or_another_one_than_torchs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    settings = str(REPOSITORY / "pyproject.toml")
    command = [sys.executable, "-m", "mypy", "--config-file", settings, str(tmp_path / "wrong.py")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=390, cwd=REPOSITORY)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    for line, code in ((3, "no-untyped-def"), (6, "type-arg"), (7, "attr-defined")):
        assert any(
            f"wrong.py:{line}: " in each and f"[{code}]" in each for each in ended.stdout.splitlines()
        ), code
