"""How jobs of other launchers are run to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import readme
import readme_script

from hocket.transport.single import SinglePeer

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def ended(command: Sequence[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; one thread for each rank."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=100, check=False
    )


def check_readme(folder: Path, size: int, transport: str) -> None:
    """Compare what the ranks of the README's script have left with one rank that reads the same global batches."""
    expected = readme_script.run(SinglePeer(), *readme.SETTINGS)["parameters"]
    left = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    for told in left:
        assert (told["transport"], told["size"]) == (transport, size)
        assert told["parameters"] == pytest.approx(expected, abs=1e-12)
