"""What READMEs and docs show: Python blocks parse, and those marked `python run` run on two ranks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
#: By page and number: its mark and text.
BLOCKS = {
    f"{page.relative_to(ROOT)} {number}": found
    for page in PAGES
    for number, found in enumerate(re.findall(r"^```python( run)?\n(.*?)^```", page.read_text(), re.M | re.S))
}


@pytest.mark.parametrize("block", BLOCKS)
def test_it_parses(block: str) -> None:
    ast.parse(BLOCKS[block][1])


@pytest.mark.parametrize("block", [name for name, (mark, _) in BLOCKS.items() if mark])
def test_it_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[block][1])
    command = [sys.executable, "-m", "hocket", "launch", "-n", "2", str(script), "agd"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "agd" in done.stdout
