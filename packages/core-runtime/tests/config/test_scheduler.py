"""Schedulers by name: built as torch builds them, stepped after each step, and part of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hocket.cli.ranking import run_virtual
from hocket.config.optimizer import build_optimizer
from hocket.config.scheduler import build_scheduler
from hocket.errors import ConfigError
from hocket.training import loop
from hocket.training.run import RunConfig, load_run, resolved

WARM_UP = {"name": "linearlr", "start_factor": 0.1, "total_iters": 6}
DECAY = {"name": "multisteplr", "milestones": [4, 9], "gamma": 0.5}


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
        ("linearlr", "schedulers: got 'linearlr'; allowed: a list, of which each is a name, or a mapping"),
        (["linearl"], "schedulers.0: there is no scheduler 'linearl'; allowed: "),
        (["lambdalr"], "schedulers.0: there is no scheduler 'lambdalr'; allowed: "),
        ([{"name": "steplr", "stepsize": 3}], "schedulers.0.stepsize: unknown argument of steplr; allowed: step_"),
        ([WARM_UP, {"name": "steplr"}], "schedulers.1: steplr refuses no arguments: "),
        ([{"name": "linearlr", "start_factor": 2}], "schedulers.0: linearlr refuses start_factor: 2: "),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_place(schedulers: Any, expected: str) -> None:
    def build() -> None:
        for reference in load_run({"schedulers": schedulers}).schedulers:
            build_scheduler(reference, sgd())

    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value).startswith(f"mapping: {expected}")


def test_a_run_steps_them_and_goes_on_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up and decay multiply; a run that is resumed in their midst ends like one that was not."""
    rates: list[float] = []

    def build_watched(*args: Any) -> torch.optim.Optimizer:
        optimizer = build_optimizer(*args)
        optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        return optimizer

    monkeypatch.setattr(loop, "build_optimizer", build_watched)
    run = run_of(schedulers=[WARM_UP, DECAY], transport="virtual", **{"checkpoint": {"every": 5}})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    run_virtual(run, whole)
    expected = [
        0.1 * min(1.0, 0.1 + 0.9 * step / 6) * 0.5 ** ((step >= 4) + (step >= 9)) for step in range(12)
    ]
    assert rates[::2] == pytest.approx(expected)
    rates.clear()
    run_virtual(run_of(schedulers=[WARM_UP, DECAY], checkpoint={"every": 5}, steps=5), cut)
    run_virtual(run, cut, resume=True)
    assert rates[::2] == pytest.approx(expected)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, cut)]
    assert summaries[0]["valid_loss"] == summaries[1]["valid_loss"]
