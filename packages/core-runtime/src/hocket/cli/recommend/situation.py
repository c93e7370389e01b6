"""The situation that `hocket recommend` is asked about: model, hosts, network, step time and late ranks."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hocket.cli.recommend.options import Asked, network_overrides
from hocket.config.source import Target, based_on
from hocket.delays import RandomSubset
from hocket.errors import ConfigError, UserError
from hocket.plan.models import model_of, model_of_size
from hocket.plugin import Registry, default_registry
from hocket.quantities import read, seconds
from hocket.results import CONFIG, METRICS, SUMMARY
from hocket.results.history import read_rows, read_summary
from hocket.results.kept_config import read_config
from hocket.results.script import SCRIPT
from hocket.strategy.scope import Placement
from hocket.task.user import call_user_function, load_user_object
from hocket.training.run import RunConfig, load_run
from hocket.transport.hosts import parse_hosts
from hocket.transport.rank_process import own_python

if TYPE_CHECKING:
    from torch import nn

    from hocket.delays import Delays

__all__ = [
    "base_of",
    "based_on_asked",
    "delays_among",
    "delays_of",
    "file_or_recipe",
    "model_asked",
    "placement_of",
    "step_seconds",
    "with_script",
]

_STEPS_MEASURED = 30


def with_script(asked: Asked) -> Asked:
    """Return the question with what the folder of a script's run says: model's size, ranks, computing of a step.

    Raises:
        UserError: the script's run has not ended.
    """
    folder = Path(asked.target or "")
    if asked.target is None or not os.path.isfile(folder / CONFIG):
        return asked
    config = read_config(folder / CONFIG)
    if config["task"].get("name") != SCRIPT:
        return asked
    if not (folder / SUMMARY).is_file():
        raise UserError(
            f"{folder}: the script's run has not ended: its steps and its model's size are not known yet"
        )
    summary = read_summary(folder / SUMMARY)
    speed = summary["steps_per_second"]  # None or 0 where no step was timed
    step = f"{(1 - summary['exposed_wait_fraction']) / speed:.6g}s" if speed else None
    return replace(
        asked,
        target=None,
        overrides=(f"ranks={config['ranks']}", *asked.overrides),
        params=asked.params or str(summary["parameters"]),
        step=asked.step or step,
    )


def base_of(asked: Asked, registry: Registry) -> RunConfig:
    """Return the run to train, with plain allreduce as its strategy."""
    from hocket.cli.checking import check_run

    base = load_run(
        based_on_asked(asked, "sgd", registry), [*asked.of_run, *_of_options(asked)], registry=registry
    )
    check_run(base)
    return base if asked.late is None else replace(base, delays=delays_of(asked.late))


def _of_options(asked: Asked) -> list[str]:
    optimizer = [] if asked.optimizer is None else [f"optimizer={asked.optimizer}"]
    return [*optimizer, *network_overrides(asked.bandwidth, asked.latency)]


def based_on_asked(asked: Asked, recipe: str, registry: Registry) -> Target:
    """Return the user's target with another recipe in place of its strategy."""
    return (
        recipe if asked.target is None else based_on(file_or_recipe(asked.target, registry), recipe, registry)
    )


def file_or_recipe(target: str, registry: Registry) -> str:
    """Return the file of the run in a folder, or else the file or recipe that a word names.

    Raises:
        UserError: the word names none of these.
    """
    path = Path(target)
    if os.path.isfile(path / CONFIG):
        read_config(path / CONFIG)
        return str(path / CONFIG)
    if os.path.isfile(path):
        return target
    try:
        registry.recipe_file(target)
    except ConfigError as error:
        raise UserError(
            f"{target}: neither a YAML file nor the folder of a run ({CONFIG} is missing), and {error}"
        ) from error
    return target


def placement_of(asked: Asked, base: RunConfig) -> Placement:
    if asked.hosts is not None:
        hosts = parse_hosts(asked.hosts)
        placement = Placement.of_counts([host.ranks for host in hosts])
    elif base.ranks is not None:
        placement = Placement(tuple(range(base.ranks)))
    else:
        raise UserError("--hosts is missing: name the ranks' hosts, such as 8x1 for 8 hosts of one rank")
    if placement.size < 2:
        raise UserError("--hosts: a single rank exchanges nothing: name two or more")
    return placement


def model_asked(asked: Asked, base: RunConfig) -> nn.Module:
    from torch import nn

    if asked.params is not None and asked.model is not None:
        raise UserError("--params and --model both give the model: leave one out")
    if asked.params is not None:
        return model_of_size(asked.params)
    if asked.model is not None:
        build = load_user_object(asked.model, "--model")
        built = call_user_function(build, asked.model, "--model")
        if not isinstance(built, nn.Module):
            raise UserError(f"--model: {asked.model} returned {type(built).__name__}, no torch.nn.Module")
        return built
    if not asked.names_task:
        raise UserError(
            "the model is missing: give --params 25M, --model module:function, task=NAME, or a run's folder"
        )
    from hocket.cli.checking import check_run

    return model_of(check_run(base).model)


def step_seconds(asked: Asked, base: RunConfig) -> float:
    """Return the seconds that a step computes: of `--step`, of the run, or measured.

    Raises:
        UserError: none of them is there, or a step cannot be measured.
    """
    if asked.step is not None:
        step_s = read("--step", seconds, asked.step)
        if step_s == 0:
            raise UserError("--step: a step computes for more than 0 s")
        return step_s
    if base.compute.step_s:
        return base.compute.step_s
    if not (asked.measure and asked.names_task):
        raise UserError(
            "--step is missing: give the time that a step computes, such as 200ms; with a task, --measure measures it"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        given = [
            f"steps={_STEPS_MEASURED}",
            "log_every=1",
            "eval_every=null",
            "checkpoint={}",
            "delays=null",
            "ranks=1",
        ]
        command = [*own_python(), "-m", "hocket", "run", *_target_words(asked, folder), *given, "-q"]
        process = subprocess.run(
            [*command, "-n", "1", "--out", str(out)], check=False, capture_output=True, text=True
        )
        if process.returncode:
            raise UserError(f"--measure: a step cannot be measured: {process.stderr.strip()}")
        rows = read_rows(out / METRICS)
    taken = [later["seconds"] - before["seconds"] for before, later in pairwise(rows)]
    return float(median(taken))


def _target_words(asked: Asked, folder: str) -> list[str]:
    if asked.target is None:
        return ["local", *asked.of_run]
    import yaml

    file = Path(folder) / "measured.yaml"
    file.write_text(yaml.safe_dump(based_on_asked(asked, "local", default_registry())))
    return [str(file), *asked.of_run]


def delays_among(base: RunConfig, placement: Placement) -> Delays | None:
    if base.delays is not None:
        try:
            base.delays.check_size(placement.size)
        except ValueError as error:
            raise UserError(f"--late among {placement.size} ranks: {error}") from error
    return base.delays


def delays_of(text: str) -> Delays:
    """Return the delays that a text such as 1x300ms@10%, or a mapping of `delays`, means.

    Raises:
        UserError: the text has neither form.
    """
    if text.lstrip().startswith("{"):
        delays = load_run("sgd", [f"delays={text}"]).delays
        assert delays is not None
        return delays
    found = re.fullmatch(r"(\d+)x([^@]+)(?:@(\d+\.?\d*)%)?", text)
    if found is None:
        raise UserError(
            f"--late: got {text!r}; allowed: 1x300ms (one rank, another in each step, is late by 0.3 s), 1x300ms@10% "
            "(in a tenth of the steps), or delays such as '{name: fixed, ranks: [0], seconds: 300ms}'"
        )
    late_s = read(f"--late {text}", seconds, found[2])
    try:
        return RandomSubset(int(found[1]), late_s, float(found[3] or 100) / 100)
    except ValueError as error:
        raise UserError(f"--late {text}: {error}") from error
