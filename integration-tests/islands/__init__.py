"""Sharded models in islands: their programs, and the same on whole models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: A process that forks the ranks of each job that a line of its input names.
RANKS = Path(__file__).parent / "ranks.py"


def run_once(folder: Path, module: str, ranks: int, names: Sequence[str]) -> None:
    """Run a module of this package on ranks to their end, in a process of its own.

    Args:
        folder: where the module writes to.
        module: its name, within this package.
        ranks: the number of ranks.
        names: what the module's `main` gets.
    """
    job = subprocess.run(
        [sys.executable, str(RANKS)],
        input=json.dumps([str(folder), module, ranks, names]) + "\n",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert job.stdout.split() == ["0"], job.stdout + job.stderr
