"""Schedulers by name: built as torch builds them, stepped after each step, and part of a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim import lr_scheduler

from hocket.cli.checking import check_run
from hocket.cli.ranking import run_virtual
from hocket.config.optimizer import build_optimizers
from hocket.config.scheduler import build_scheduler
from hocket.errors import ConfigError
from hocket.training import loop
from hocket.training.run import RunConfig, load_run, resolved

WARM_UP = {"name": "linearlr", "start_factor": 0.1, "total_iters": 6}
DECAY = {"name": "multisteplr", "milestones": [4, 9], "gamma": 0.5}


#: Warm-up, stable, decay.
WSD = {
    "name": "sequentiallr",
    "milestones": [4, 8],
    "schedulers": [
        {"name": "linearlr", "start_factor": 0.25, "total_iters": 4},
        {"name": "constantlr", "factor": 1},
        {"name": "linearlr", "start_factor": 1, "end_factor": 0.1, "total_iters": 4},
    ],
}
PLATEAU = {
    "name": "reducelronplateau",
    "metric": "train_loss",
    "factor": 0.5,
    "patience": 0,
    "threshold": 0.9,
}


def halved(step: int) -> float:
    """Return what a LambdaLR of a file multiplies by."""
    return 1.0 if step < 5 else 0.5


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.2)


def run_of(*overrides: str, **settings: Any) -> RunConfig:
    return load_run({"recipe": "dpsgd", "ranks": 2, "steps": 12, **settings}, overrides)


def test_a_scheduler_is_torchs_own_with_the_arguments_given() -> None:
    [reference] = load_run("sgd", ["schedulers=[{name: cosineannealinglr, T_max: 30}]"]).schedulers
    scheduler = build_scheduler(reference, sgd())
    assert type(scheduler) is torch.optim.lr_scheduler.CosineAnnealingLR
    assert scheduler.T_max == 30


def test_what_is_resolved_is_complete_and_loads_to_the_same(tmp_path: Path) -> None:
    plain = resolved(run_of(schedulers=[WARM_UP, DECAY]))
    assert plain["schedulers"][0] == {**WARM_UP, "end_factor": 1.0}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(plain))
    assert resolved(load_run(path)) == plain


@pytest.mark.parametrize(
    ("schedulers", "expected"),
    [
        ("linearlr", "schedulers: got 'linearlr'; allowed: a list; each item is a name, or a mapping"),
        (["linearl"], "schedulers.0: there is no scheduler 'linearl'. Did you mean 'linearlr'? "),
        (["lambdalr"], "schedulers.0: lambdalr refuses no arguments: "),
        ([{"name": "lambdalr", "lr_lambda": "math:sqr"}], "schedulers.0.lr_lambda: cannot import 'math:sqr': "),
        ([{"name": "lambdalr", "lr_lambda": "math:pi"}], "schedulers.0.lr_lambda: 'math:pi' cannot be called"),
        ([{"name": "cosineannealinglr", "T_max": "x"}], "schedulers.0.T_max: got 'x'; allowed: a number"),
        ([{"name": "cosineannealinglr", "T_max": 0}], "schedulers.0: cosineannealinglr cannot step: ZeroDivisionError"),
        ([{**WSD, "milestones": [4]}], "schedulers.0: sequentiallr refuses milestones: (4,): Sequential Schedulers"),
        ([{**WSD, "schedulers": ["linearl"]}], "schedulers.0.schedulers.0: there is no scheduler 'linearl'. "),
        ([{**WSD, "schedulers": "linearlr"}], "schedulers.0.schedulers: got 'linearlr'; allowed: a list; each item "),
        ([{**WSD, "schedulers": [PLATEAU]}], "schedulers.0.schedulers.0: reducelronplateau steps by a metric"),
        ([{**PLATEAU, "metric": 3}], "schedulers.0.metric: got 3; allowed: a metric's name, such as valid_loss"),
        ([{**PLATEAU, "metric": "loss"}], "schedulers.0.metric: got 'loss'; allowed: train_loss, or a name that "),
        (["torch.nn:Linear"], "schedulers.0: 'torch.nn:Linear' is not a subclass of torch.optim.lr_scheduler.LRS"),
        ([{"name": "steplr", "stepsize": 3}], "schedulers.0.stepsize: unknown argument of steplr. Did you mean 'st"),
        ([WARM_UP, {"name": "steplr"}], "schedulers.1: steplr refuses no arguments: "),
        ([{"name": "linearlr", "start_factor": 2}], "schedulers.0: linearlr refuses start_factor: 2: "),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_place(schedulers: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(load_run({"schedulers": schedulers}))
    assert str(caught.value).startswith(f"mapping: {expected}")


def by_hand(optimizer: torch.optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4),
        lr_scheduler.ConstantLR(optimizer, 1),
        lr_scheduler.LinearLR(optimizer, 1, 0.1, 4),
    ]
    return [lr_scheduler.SequentialLR(optimizer, parts, [4, 8])]


@pytest.mark.parametrize(
    ("schedulers", "expected"),
    [
        ([WSD], by_hand),
        ([{"name": "lambdalr", "lr_lambda": f"{__name__}:halved"}], lambda o: [lr_scheduler.LambdaLR(o, halved)]),
        ([{"name": "chainedscheduler", "schedulers": [WARM_UP, DECAY]}], lambda o: [lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.MultiStepLR(o, [4, 9], 0.5)])]),
        ([WARM_UP, {"name": "cosineannealinglr", "T_max": 12}], lambda o: [
            lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(o, 12)]),
    ],
    ids=["wsd", "lambda", "chained", "multiplied"],
)  # fmt: skip
def test_rates_are_those_of_torchs_own(
    schedulers: Any, expected: Any, tmp_path: Path, rates: dict[str, list[float]]
) -> None:
    run_virtual(run_of(schedulers=schedulers, optimizer={"name": "sgd", "lr": 0.2}), tmp_path)
    own = sgd()
    built = expected(own)
    for given in rates["SGD"][::2]:
        assert given == own.param_groups[0]["lr"]
        own.step()
        for each in built:
            each.step()
    assert len(rates["SGD"]) == 2 * 12


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Return the learning rates of every step of the runs to come, rank by rank, by the optimizers' classes."""
    found: dict[str, list[float]] = {}

    def build_watched(*args: Any) -> list[torch.optim.Optimizer]:
        built = build_optimizers(*args)
        for each in built:
            told = found.setdefault(type(each).__name__, [])
            each.register_step_pre_hook(lambda o, *_, told=told: told.append(o.param_groups[0]["lr"]))
        return built

    monkeypatch.setattr(loop, "build_optimizers", build_watched)
    return found


@pytest.mark.usefixtures("with_muon")
def test_a_run_steps_them_and_goes_on_with_them(tmp_path: Path, rates: dict[str, list[float]]) -> None:
    """Of two optimizers, with a metric, batches that add up and clipping; one resumed in the midst of it ends alike."""
    run = run_of(
        optimizer={"name": "muon", "lr": 0.02, "rest": {"name": "adamw", "lr": 1e-3}},
        schedulers=[WSD, PLATEAU, DECAY],
        accumulate=3,
        clip_grad_norm=0.5,
        batch_size=16,
        log_every=3,
        checkpoint={"every": 5, "keep": 9},
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    (cut / "checkpoints").mkdir(parents=True)
    run_virtual(run, whole)
    expected = {name: list(told) for name, told in rates.items()}
    rows = [json.loads(line)["train_loss"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    # From the second row on no loss is so much better than the first.
    assert len(rows) == 4
    assert rows[1] > 0.1 * rows[0]
    wsd = [min(1.0, 0.25 + 0.75 * step / 4) * (1 - 0.9 * max(0, step - 8) / 4) for step in range(12)]
    # SequentialLR sets the rate anew where its decay begins, at step 8.
    halvings = [(step >= 4) + (step >= 6) if step < 8 else 2 * (step >= 9) for step in range(12)]
    others = [0.5**count for count in halvings]
    for name, rate in (("Muon", 0.02), ("AdamW", 1e-3)):
        assert expected[name][::2] == pytest.approx([rate * a * b for a, b in zip(wsd, others, strict=True)])
    rates.clear()
    for name in ("metrics.jsonl", ".hocket.json"):
        shutil.copy(whole / name, cut)
    shutil.copytree(whole / "checkpoints/step-00000005", cut / "checkpoints/step-00000005")
    run_virtual(run, cut, resume=True)
    assert rates == {name: told[2 * 5 :] for name, told in expected.items()}
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_metric_that_a_task_has_not_is_refused_when_it_is_known(tmp_path: Path) -> None:
    plateau = {"name": "reducelronplateau", "metric": "valid_acuracy"}
    with pytest.raises(ConfigError) as caught:
        run_virtual(run_of(schedulers=[plateau]), tmp_path)
    assert str(caught.value).endswith(
        "schedulers.0.metric: the task has no metric 'valid_acuracy'. Did you mean 'valid_accuracy'? "
        "Allowed: train_loss, valid_loss, valid_accuracy"
    )
