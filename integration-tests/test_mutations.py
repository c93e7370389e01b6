"""The mistakes that `mutations.py` makes on purpose are still mistakes in the source of today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_each_text_that_is_replaced_stands_once_in_its_file() -> None:
    program = Path(__file__).parent / "mutations.py"
    ended = subprocess.run(
        [sys.executable, program, "--check"], check=False, capture_output=True, text=True, timeout=100
    )
    assert not ended.returncode, ended.stdout + ended.stderr
