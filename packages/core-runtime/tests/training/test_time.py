"""Seconds of runs are those of training: measuring a run takes none, and exchanges overlap with computing."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import hocket
from hocket.cli.main import main
from hocket.delays import RandomSubset
from hocket.plan.advice import predict
from hocket.plan.plan import plan
from hocket.strategy.scope import Placement
from hocket.transport.network import NetworkModel

RANKS, STEPS, STEP_S = 4, 24, 0.02
LAYERS, WIDTH = 5, 64
#: An allreduce of a layer (4,160 floats, and a trailer) takes about 6 ms, the consensus far longer than a step.
NETWORK = NetworkModel(latency_s=1e-4, bandwidth_bits_per_s=36e6)

SOURCE = f"""
    from torch import nn

    from hocket.task import Digits


    class Layers(Digits):
        def model(self):
            return nn.Sequential(nn.Flatten(), *(nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))
"""

#: Carries out a run on virtual ranks, and returns its rows and its summary.
Train = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    monkeypatch.chdir(tmp_path)
    Path("layered.py").write_text(textwrap.dedent(SOURCE))
    network = f"{{latency_s: {NETWORK.latency_s}, bandwidth_bits_per_s: {NETWORK.bandwidth_bits_per_s}}}"

    def run(recipe: str, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        fixed = (
            "-n",
            str(RANKS),
            "--transport",
            "virtual",
            "-q",
            "task=layered:Layers",
            f"network={network}",
        )
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        monkeypatch.setattr(sys, "argv", ["hocket", "run", recipe, *fixed, *arguments, "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return rows, json.loads((out / "summary.json").read_text())

    return run


def test_local_steps_take_what_computing_takes(train: Train) -> None:
    rows, summary = train("local", f"compute={{step_s: {STEP_S}}}", "epochs=2", "log_every=1", "eval_every=5")
    assert [row["seconds"] for row in rows] == pytest.approx([row["step"] * STEP_S for row in rows], rel=1e-9)
    assert summary["steps_per_second"] == pytest.approx(1 / STEP_S, rel=1e-9)
    assert rows[-1]["consensus_distance"] > 0


def test_local_ranks_are_as_late_as_their_own_delays(train: Train) -> None:
    """The slowest has ended a step when the sum of its delays is over, however often ranks meet to be measured."""
    late = "delays={name: random_subset, count: 1, seconds: 0.3}"
    rows, _ = train("local", f"compute={{step_s: {STEP_S}}}", late, "epochs=2", "log_every=1")
    delays = RandomSubset(1, 0.3)
    own = np.cumsum([STEP_S + delays.of_step(step, RANKS, 0) for step in range(STEPS)], axis=0)
    assert [row["seconds"] for row in rows] == pytest.approx(own.max(axis=1), rel=1e-9)


@pytest.mark.parametrize(
    "recipe",
    ["agd", "dpsgd", *(pytest.param(each, marks=pytest.mark.full) for each in ("sgd", "periodic_average"))],
)
def test_measuring_takes_no_time(recipe: str, train: Train) -> None:
    late = "delays={name: random_subset, count: 1, seconds: 0.3}"
    settings = (f"compute={{step_s: {STEP_S}}}", late, "epochs=2")
    few, rarely = train(recipe, *settings, "log_every=100")
    rows, often = train(recipe, *settings, "log_every=1", "eval_every=3", "checkpoint.every=7")
    # What ranks tell each other of their first batch, once, may be under way while they are measured: a wait for one
    # late rank.
    assert often["seconds"] == pytest.approx(rarely["seconds"], abs=1e-3)
    assert often["exposed_wait_fraction_ranks"] == pytest.approx(
        rarely["exposed_wait_fraction_ranks"], abs=0.3 / rarely["seconds"]
    )
    (of_few,), (of_rows,) = ([row for row in each if row["step"] == STEPS // 2] for each in (few, rows))
    assert often["seconds"] - of_rows["seconds"] == pytest.approx(
        rarely["seconds"] - of_few["seconds"], rel=1e-9
    )
    assert all(0 <= row["wait_share_min"] <= row["wait_share_max"] <= 1 for row in rows)


def test_backward_hides_all_but_the_last_layer_s_exchange(train: Train) -> None:
    layer_s = NETWORK.allreduce_seconds(4 * (WIDTH * WIDTH + WIDTH), RANKS)
    step_s = 3 / 2 * 1.1 * layer_s * LAYERS  # a layer's backward is a bit longer than its exchange
    waited = {}
    for recipe in ("sgd", "agd"):
        _, summary = train(recipe, f"compute={{step_s: {step_s}}}", "epochs=1", "gradients.0.segments=layers")
        assert summary["steps"] == STEPS // 2
        waited[recipe] = 1 / summary["steps_per_second"] - step_s
    assert waited["sgd"] == pytest.approx(LAYERS * layer_s, rel=0.02)
    assert waited["agd"] == pytest.approx(layer_s, rel=0.02)


@pytest.mark.parametrize(
    ("segments", "step_s"),
    [
        ("layers", 0.02),
        ("layers", 0.06),
        ("{name: bytes, size_mb: 100}", 0.06),
        ("{name: bytes, size_mb: 0.04}", 0.02),
        ("{name: bytes, first_mb: 0.02}", 0.06),
    ],
)
def test_backward_hides_as_much_as_is_predicted(segments: str, step_s: float, train: Train) -> None:
    """A single segment is sent when backward has ended: of it nothing is hidden."""
    override = f"gradients.0.segments={segments}"
    _, summary = train("agd", f"compute={{step_s: {step_s}}}", "epochs=1", override)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    planned = plan(hocket.compose("agd", override), model, Placement(tuple(range(RANKS))), NETWORK)
    predicted = predict(planned, step_s)
    # Segments that follow each other closely hide some latency of the next.
    assert predicted.step_s == pytest.approx(1 / summary["steps_per_second"], rel=0.03)
    if "100" in segments:
        assert predicted.exposed_s == pytest.approx(planned.seconds_per_step)


def test_forward_hides_what_comes_before_a_layer_is_read(train: Train) -> None:
    """The first layer's exchange is exposed; a third of a step hides as much of the others'."""
    step_s, seconds = 3 * 0.05, {}
    for overlap in ("none", "forward"):
        settings = (f"compute={{step_s: {step_s}}}", "epochs=1", "parameters.0.segments=layers")
        _, summary = train("dpsgd", *settings, f"parameters.0.overlap={overlap}")
        seconds[overlap] = summary["seconds"]
    exposed_s = seconds["none"] - STEPS // 2 * step_s
    # The exchange after the last step has no forward to overlap with.
    hidden_s = (seconds["none"] - seconds["forward"]) / (STEPS // 2 - 1)
    assert hidden_s == pytest.approx(exposed_s / (STEPS // 2) * (LAYERS - 1) / LAYERS, rel=0.05)


def test_accumulated_batches_take_a_step_together(train: Train) -> None:
    free = "network={latency_s: 0, bandwidth_bits_per_s: .inf}"
    rows, _ = train("agd", "compute={step_s: 0.1}", "epochs=1", "accumulate=3", free)
    assert rows[-1]["seconds"] == pytest.approx(rows[-1]["step"] * 0.1, abs=1e-3)
