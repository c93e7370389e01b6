"""A process that a rank forks is no rank: however it ends, the job goes on."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.transport.mpiexec import find_mpiexec

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, "ValueError: in the child"),
        ("exit", 3, ""),
        ("end", 0, ""),
        ("exchange", 0, "refused: process "),
    ],
)
def test_a_forked_process_does_nothing_of_its_ranks(how: str, status: int, said: str) -> None:
    program = [sys.executable, str(Path(__file__).with_name("forking_rank.py")), how]
    command = find_mpiexec().command(2, program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"child {status}" in done.stdout
    assert said in done.stderr
    assert "all ranks end" not in done.stderr
