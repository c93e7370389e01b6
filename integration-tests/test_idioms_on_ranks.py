"""Some of the programs over torch's transport and MPI: ranks that are processes have one process's numbers, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import idiom_rank
import pytest
from idioms.corpus import EXACT, has_exact, missing, names

RANKS = 2

#: One that is cheap, with two sessions, two backwards before a step, and steps without a loader.
FEW = ["dcgan", "ema_averaged_model", "ppo"]

#: Dynamo would trace the hooks of processes for minutes.
LEFT_OUT = ("compiled",)

_JOB_TIMEOUT_S = 200


def carry_out(folder: Path, transport: str, chosen: str, programs: list[str]) -> None:
    launch = [sys.executable, "-m", "hocket", "launch", "-n", str(RANKS), "--transport", transport]
    ended = subprocess.run(
        [*launch, idiom_rank.__file__, str(folder), chosen, *programs],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=_JOB_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    for name in programs:
        of_ranks = json.loads((folder / f"{name}.json").read_text())
        assert len(of_ranks) == RANKS
        for wrong, steps in of_ranks:
            assert wrong < 1e-9, name
            assert steps == of_ranks[0][1], name


@pytest.mark.timeout(240)
def test_some_over_torch(tmp_path: Path) -> None:
    carry_out(tmp_path, "torch", "agd", FEW)


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("chosen", EXACT)
@pytest.mark.parametrize("transport", ["torch", "mpi"])
def test_all(tmp_path: Path, transport: str, chosen: str) -> None:
    programs = [name for name in names() if not missing(name) and name not in LEFT_OUT]
    carry_out(tmp_path, transport, chosen, [name for name in programs if has_exact(name, chosen)])
