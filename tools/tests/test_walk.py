"""Tests of the walk of a gradient that `tools/count --walk` prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_it_leads_from_the_hook_to_the_wire() -> None:
    ended = subprocess.run(
        [REPOSITORY / "tools/count", "--walk", "--list"],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHON": sys.executable},
    )
    *functions, figures = ended.stdout.splitlines()
    assert functions[0].endswith("hook")
    assert functions[-1].endswith("Pipe.sendmsg")
    numbers = [int(number) for number in re.findall(r"\d+", figures)]
    assert len(numbers) == 5
    assert numbers[0] <= 15
    assert numbers[-1] <= 10
