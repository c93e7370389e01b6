"""A process that a rank forks is no rank: however it ends, the job goes on."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("transport", "how", "status", "said"),
    [
        ("mpi", "raise", 1, "ValueError: in the child"),
        pytest.param("torch", "raise", 1, "ValueError: in the child", marks=pytest.mark.full),
        pytest.param("mpi", "exit", 3, "", marks=pytest.mark.full),
        ("mpi", "end", 0, ""),
        ("mpi", "exchange", 0, "refused: process "),
        ("torch", "exchange", 0, "refused: process "),
    ],
)
def test_a_forked_process_does_nothing_of_its_ranks(transport: str, how: str, status: int, said: str) -> None:
    if transport == "mpi" and find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    here = Path(__file__).parent
    program = [sys.executable, str(here / "forking_rank.py"), how]
    command = [sys.executable, str(here / "job.py"), transport, "2", "-", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"child {status}" in done.stdout
    assert said in done.stderr
    assert "all ranks end" not in done.stderr
