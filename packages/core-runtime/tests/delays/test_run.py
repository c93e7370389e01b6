"""`hocket run` with delays: how long it takes, on the virtual clock exactly, and that no number but time changes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from hocket.cli.main import main
from hocket.delays import ComputeModel, Delays, RandomSubset, Recorded, ShiftingSkew

#: Exchanges take no time. 1442 samples make 12 steps of 4 ranks.
FREE = "network={latency_s: 0, bandwidth_bits_per_s: .inf}"
STEPS, RANKS = 12, 4


def arguments(out: Path, *more: str) -> list[str]:
    return [
        "run",
        "sgd",
        *more,
        "-n",
        str(RANKS),
        "epochs=1",
        "task.hidden=8",
        "log_every=100",
        "--out",
        str(out),
    ]


def run(out: Path, *more: str) -> dict[str, Any]:
    """Carry out a run on virtual ranks, in this process, and return its summary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hocket", *arguments(out, "--transport", "virtual", *more)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    return summary_of(out)


def summary_of(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def table(delays: Delays, seed: int = 0) -> Any:
    return np.stack([delays.of_step(step, RANKS, seed) for step in range(STEPS)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without delays."""
    out = tmp_path_factory.mktemp("plain")
    assert run(out, FREE)["seconds"] < 1e-3  # polls cost microseconds
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


def test_who_waits_for_all_waits_for_the_slowest(plain: Path, tmp_path: Path) -> None:
    delays = "{name: shifting_skew, shortest_s: 0.05, longest_s: 0.4}"
    summary = run(tmp_path, FREE, f"delays={delays}")
    seconds = table(ShiftingSkew(0.05, 0.4))
    assert summary["seconds"] == pytest.approx(seconds.max(axis=1).sum(), abs=1e-3)
    waited = (seconds.max(axis=1, keepdims=True) - seconds).sum() / RANKS
    assert summary["exposed_wait_fraction"] == pytest.approx(waited / summary["seconds"], abs=1e-3)
    expected, given = weights(plain), weights(tmp_path)
    assert all(torch.equal(expected[name], given[name]) for name in expected)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["delays"] == {"name": "shifting_skew", "shortest_s": 0.05, "longest_s": 0.4}


def test_who_waits_for_nobody_has_its_own_delays(tmp_path: Path) -> None:
    """At the end the losses are gathered: from the rank that was held up for longest in all."""
    delays = "delays={name: random_subset, count: 2, seconds: 0.25}"
    summary = run(tmp_path, FREE, delays, "seed=5", "strategy.gradients=[]")
    sums = table(RandomSubset(2, 0.25), seed=5).sum(axis=0)
    assert summary["seconds"] == pytest.approx(sums.max(), abs=1e-3)
    assert sums.max() < 0.25 * STEPS


def test_computing_takes_time_by_the_size_of_a_batch(tmp_path: Path) -> None:
    """32 images of 64 pixels a step and rank; the last of twelve has 34 for all ranks, 9 for the first."""
    summary = run(tmp_path, FREE, "compute={step_s: 0.01, element_s: 1e-5}")
    model = ComputeModel(0.01, 1e-5)
    expected = 11 * model.seconds(32 * 64) + model.seconds(9 * 64)
    assert summary["seconds"] == pytest.approx(expected, abs=1e-4)


def test_a_resumed_run_is_delayed_as_if_it_had_not_ended(tmp_path: Path) -> None:
    (tmp_path / "delays.csv").write_text("rank,step,seconds\n2,1,0.5\n0,7,1.5\n3,7,2.5\n1,11,0.25\n")
    delays = f"delays={{name: file, file: {tmp_path / 'delays.csv'}}}"
    out = tmp_path / "out"
    begun = run(out, FREE, delays, "steps=5", "checkpoint.every=5")
    assert begun["seconds"] == pytest.approx(0.5, abs=1e-3)
    summary = run(out, FREE, delays, "steps=null", "--resume")
    assert (begun["steps"], summary["steps"]) == (5, STEPS)
    whole = table(Recorded(str(tmp_path / "delays.csv"))).max(axis=1).sum()
    assert whole == 3.25
    assert summary["seconds"] == pytest.approx(whole, abs=1e-3)


def test_a_trace_shows_the_delay_as_a_phase_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, FREE, "delays={name: fixed, ranks: [1], seconds: 0.25}", "--trace")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    phases = [event for event in events if event["name"] == "delay" and event["ph"] == "X"]
    assert [event["pid"] for event in phases] == [phases[0]["pid"]] * STEPS
    assert [event["dur"] for event in phases] == pytest.approx([250_000.0] * STEPS, abs=10)


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_over_mpi_ranks_sleep(plain: Path, tmp_path: Path) -> None:
    """The same weights, no sooner than the slowest ranks allow, and most of the time was waited for them."""
    delays = "delays={name: random_subset, count: 1, seconds: 0.2}"
    command = [sys.executable, "-m", "hocket", *arguments(tmp_path, delays)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    summary = summary_of(tmp_path)
    assert summary["seconds"] >= STEPS * 0.2
    # Each step three ranks of four wait for the fourth: of its 0.2 s, were there nothing else.
    assert summary["exposed_wait_fraction"] * summary["seconds"] >= 0.5 * STEPS * 0.2 * 3 / 4
    expected, given = weights(plain), weights(tmp_path)
    assert all(torch.equal(expected[name], given[name]) for name in expected)
