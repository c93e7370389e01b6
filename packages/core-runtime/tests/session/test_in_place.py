"""Exchanges in memory that the ranks of a host share, over real MPI: one buffer, and the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hocket.transport.launching import find_mpiexec

RANKS = 4


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_all_cases_in_one_job() -> None:
    path = Path(__file__).parent / "in_place_cases.py"
    command = find_mpiexec().command(RANKS, [sys.executable, str(path)])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.count("passed ") == 5, ended.stdout
