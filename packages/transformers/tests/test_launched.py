"""A script of Trainer's under the launchers that set torch's variables; mpiexec starts the other tests' ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

SCRIPT = str(Path(__file__).parent / "launched_rank.py")
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "accelerate": [
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ],
    "hocket": ["-m", "hocket", "launch", "-n", "2", "--transport", "torch"],
}


@pytest.mark.parametrize(
    "launcher",
    ["torchrun", *(pytest.param(name, marks=pytest.mark.full) for name in ("accelerate", "hocket"))],
)
def test_a_script(launcher: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    left = json.loads((tmp_path / "weights.json").read_text())
    assert left == pytest.approx(tiny.one_process(tiny.Texts(40, masked=True), 2, 1), abs=1e-6)
