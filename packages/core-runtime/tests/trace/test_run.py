"""`hocket run --trace`, whole, over MPI: a trace that keeps the rules, and one of a run that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from schema import load

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]

STEPS = 6


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hocket", "run", *arguments, "-n", "2", "--out", "out"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


# An allreduce of the gradients, and messages beside it.
GOSSIP = "strategy.parameters=[{collective: gossip, over: world, topology: ring, every: 2}]"


def test_a_trace_of_two_ranks(tmp_path: Path) -> None:
    done = run("sgd", GOSSIP, f"steps={STEPS}", "--trace", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trace: open out/trace.json.gz in https://ui.perfetto.dev" in done.stdout
    trace = load(tmp_path / "out" / "trace.json.gz", 2)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert trace.other == {
        "ranks": 2,
        "recorded_ranks": [0, 1],
        "transport": "mpi",
        "unjoined_messages": 0,
    }
    assert not (tmp_path / "out" / "trace-recordings").exists()
    assert 0 <= summary["overlap_share"] <= 1
    under_way_us = 0.0
    for rank in range(2):
        assert len(trace.slices(rank, "step")) == STEPS
        exchanges = trace.exchanges(rank)
        assert Counter(begin["name"] for begin, _ in exchanges) == {
            "gradients.0[0]": STEPS,
            "parameters.0[0]": STEPS // 2,
        }
        under_way_us += sum(end["ts"] - begin["ts"] for begin, end in exchanges)
    waits_us = sum(s["dur"] for rank in range(2) for s in trace.slices(rank, "exposed wait"))
    # No exchange overlaps another here.
    assert summary["overlap_share"] == pytest.approx(1 - waits_us / under_way_us, abs=0.02)
    assert len(trace.arrows) == 2 * STEPS // 2


@pytest.mark.full
def test_exchanges_with_neighbours_on_devices_are_traced_whole(tmp_path: Path) -> None:
    done = run("dpsgd", f"steps={STEPS}", "lanes=gloo", "--trace", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    trace = load(tmp_path / "out" / "trace.json.gz", 2)
    assert not trace.arrows
    for rank in range(2):
        assert len(trace.exchanges(rank)) == STEPS
        names = [each["name"] for each in trace.slices(rank, "collective")]
        assert names.count("exchange in parameters.0[0] of ranks 0 1") == STEPS


@pytest.mark.full
def test_without_trace_there_is_none(tmp_path: Path) -> None:
    done = run("sgd", f"steps={STEPS}", "--transport", "virtual", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perfetto" not in done.stdout
    assert not list((tmp_path / "out").glob("trace*"))
    assert 0 <= json.loads((tmp_path / "out" / "summary.json").read_text())["overlap_share"] <= 1


# The first loss is that of the sample that is evaluated before training.
DYING_TASK = """
import os, signal
from dataclasses import dataclass
import torch
from hocket.task import Digits

@dataclass(frozen=True)
class Dying(Digits):
    def loss(self, output, target):
        Dying.calls = getattr(Dying, "calls", 0) + 1
        if Dying.calls == 5 and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, target)
"""


def test_a_run_that_is_killed_leaves_a_trace_of_all_it_did(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(DYING_TASK)
    done = run("sgd", "task=my_task:Dying", "--trace", cwd=tmp_path)
    assert done.returncode != 0
    assert "hocket: trace of the ranks until the failure: out/trace.json.gz" in done.stderr
    trace = load(tmp_path / "out" / "trace.json.gz", 2)
    for rank in range(2):
        assert len(trace.slices(rank, "step")) == 3
    # Rank 0 waited for rank 1 when it was ended itself, or found that rank 1 was gone.
    *_, (begin, _) = trace.exchanges(0)
    assert begin["args"]["round"] == 3
    assert begin["args"].get("unfinished") or begin["args"]["error"].startswith("PeerLostError")
