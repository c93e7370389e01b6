"""Ranks that are killed in the middle of a save, over MPI: the run goes on from the last complete checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hocket.checkpoint import folder as folders

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("afresh"),  # ranks are found by their commands
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

ARGUMENTS = ("dpsgd", "-n", "2", "epochs=2", "checkpoint.every=3")
LATEST_S = 100.0


def start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hocket", "run", *ARGUMENTS, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ranks_of(out: Path) -> list[int]:
    """Return the processes of the job's ranks: those that were given its folder, and started by mpiexec."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"hocket.cli.ranking" in words[:4] and str(out).encode() in words:
            found.append(int(process.name))
    return found


def test_killed_while_saving(hocket: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = start(out)
    deadline_s = time.monotonic() + LATEST_S
    while not (len(folders.complete(out / "checkpoints")) == 2 and folders.incomplete(out / "checkpoints")):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.001)  # a save takes longer
    for pid in ranks_of(out):
        os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode != 0
    step = int(folders.newest_first(out / "checkpoints")[0].name.partition("-")[2])
    assert not (out / "summary.json").exists()

    # On virtual ranks, which start sooner.
    again = hocket("run", *ARGUMENTS, "--transport", "virtual", "--out", str(out), "--resume")
    assert again.status == 0, again.err
    assert f"resumed after step {step} from" in again.out
    assert not folders.incomplete(out / "checkpoints")

    whole = hocket("run", *ARGUMENTS, "--transport", "virtual", "--out", str(tmp_path / "whole"))
    assert whole.status == 0, whole.err
    expected, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert all(torch.equal(value, given[name]) for name, value in expected.items())
    rows, expected_rows = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (out, tmp_path / "whole")
    )
    for key in ("step", "train_loss", "valid_loss", "bytes_sent"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in expected_rows]
