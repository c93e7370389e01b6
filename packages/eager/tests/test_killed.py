"""A rank that is killed in the middle of a round: the others are told which rank, and which round."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from killed import ROUND, VICTIM

from hocket.launch.mpiexec import find_mpiexec

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


@pytest.mark.parametrize("path", ["messages", "shared"])
def test_survivors_are_told(path: str) -> None:
    if not find_mpiexec().notifies_of_deaths:
        pytest.skip("this MPI ends all ranks when one has died")
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed.py")), path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    # The launcher ends the job with the first survivor, whose message may be all that is passed on.
    pattern = r"gradients\.0\[0\], round (\d+): rank (\d): .*?rank (\d) has died"
    told = re.findall(pattern, done.stdout + done.stderr)
    assert told, done.stdout + done.stderr
    for round, rank, dead in told:
        # By messages the others may have had what they needed of the dead rank for its last round.
        assert int(round) in (ROUND, ROUND + (path == "messages"))
        assert int(dead) == VICTIM
        assert int(rank) != VICTIM
    assert time.monotonic() - start_s < 30
