"""What READMEs and docs show: Python blocks parse, and those marked `python run` run on two ranks.

`python run by torchrun` is a script of torch's own, without Hocket.
"""

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
    for number, found in enumerate(
        re.findall(r"^```python( run(?: by torchrun)?)?\n(.*?)^```", page.read_text(), re.M | re.S)
    )
}


@pytest.mark.parametrize("block", BLOCKS)
def test_it_parses(block: str) -> None:
    ast.parse(BLOCKS[block][1])


@pytest.mark.parametrize("block", [name for name, (mark, _) in BLOCKS.items() if mark])
def test_it_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    mark, text = BLOCKS[block]
    script.write_text(text)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    by_torch = mark.endswith("torchrun")
    command = torchrun if by_torch else ["hocket", "launch", "-n", "2", str(script), "agd"]
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert ("loss" if by_torch else "agd") in done.stdout
