"""The situation and the strategies that `hocket recommend` is asked about."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hocket.cli.network_options import model_asked, network_overrides
from hocket.cli.planned import placed
from hocket.cli.rank_options import island_overrides
from hocket.config.source import SLOTS, Target, based_on, parse_override
from hocket.delays import RandomSubset
from hocket.errors import ConfigError, HocketError, UserError
from hocket.plan.advice import AdvisedStrategy, TrainingSituation
from hocket.plugin import Registry
from hocket.plugin.discovery import KNOWN_WORDS, TASKS
from hocket.quantities import read, seconds
from hocket.results import CONFIG, METRICS, SUMMARY
from hocket.results.history import read_rows, read_summary
from hocket.results.kept_config import read_config, text_of_config
from hocket.results.script import SCRIPT
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, load_run, resolved
from hocket.transport.hosts import parse_hosts
from hocket.transport.rank_process import own_python

if TYPE_CHECKING:
    from hocket.delays import Delays

__all__ = ["Asked", "delays_of"]

_STEPS_MEASURED = 30
#: Longer values of overrides are left out of a strategy's name.
_LONGEST = 20
_STRATEGY_KEYS = (*SLOTS, "strategy", "phases", "recipe")
#: The optimizers with which costs were measured; a recipe that needs another one is compared where it is asked for.
_USUAL = ("sgd", "adamw")


@dataclass
class Asked:
    """The question of `hocket recommend`: a run, overrides of it, and the options by their names.

    Raises:
        UserError: an option is wrong or missing, or the run cannot be read; the methods raise it, too.
    """

    registry: Registry
    target: str | None
    overrides: Sequence[str]
    params: str | None = None
    model: str | None = None
    hosts: str | None = None
    bandwidth: str | None = None
    latency: str | None = None
    step: str | None = None
    late: str | None = None
    optimizer: str | None = None
    measure: bool = False
    all: bool = False
    island: int | None = None

    def __post_init__(self) -> None:
        self._read_script_run()
        self.overrides = [*self.overrides, *island_overrides(self.island)]
        self.of_strategy = [each for each in self.overrides if parse_override(each).keys[0] in _STRATEGY_KEYS]
        self.of_run = [each for each in self.overrides if each not in self.of_strategy]
        if self.of_strategy and self.target is None:
            raise UserError(
                f"{self.of_strategy[0]} changes one strategy: name it, such as `hocket recommend diloco "
                "parameters.0.every=30`, or a file"
            )
        if self.target is not None:
            self.target = _file_or_recipe(self.target, self.registry)
        self.base = self._base()

    def _read_script_run(self) -> None:
        """Take the model's size, the ranks and the computing of a step from the folder of a script's run."""
        folder = Path(self.target or "")
        if self.target is None or not os.path.isfile(folder / CONFIG):
            return
        config = read_config(folder / CONFIG)
        if config["task"].get("name") != SCRIPT:
            return
        if not (folder / SUMMARY).is_file():
            raise UserError(
                f"{folder}: the script's run has not ended: its steps and its model's size are not known yet"
            )
        summary = read_summary(folder / SUMMARY)
        ranks, islands = config["ranks"], summary.get("islands", config["ranks"])
        self.target, self.overrides = None, [f"ranks={ranks}", *self.overrides]
        if islands < ranks:
            self.island = self.island or ranks // islands
        self.params = self.params or str(summary["parameters"])
        if speed := summary["steps_per_second"]:  # None or 0 where no step was timed
            self.step = self.step or f"{(1 - summary['exposed_wait_fraction']) / speed:.6g}s"

    def _base(self) -> RunConfig:
        """Return the run to train, with synchronous SGD as its strategy."""
        from hocket.cli.checking import check_run

        options = [] if self.optimizer is None else [f"optimizer={self.optimizer}"]
        options += network_overrides(self.bandwidth, self.latency)
        base = load_run(self.based_on("sgd"), [*self.of_run, *options], registry=self.registry)
        check_run(base)
        return base if self.late is None else replace(base, delays=delays_of(self.late))

    def based_on(self, recipe: str) -> Target:
        """Return the user's run with a recipe in place of its strategy."""
        return recipe if self.target is None else based_on(self.target, recipe, self.registry)

    @property
    def names_task(self) -> bool:
        """True if a run or an override names the task."""
        is_run = self.target is not None and os.path.exists(self.target)
        return is_run or any(each.startswith("task") for each in self.overrides)

    @property
    def absent(self) -> list[str]:
        """The packages with recipes that are not installed."""
        there = {TASKS, *self.registry.installed()}
        return [f"hocket-{word}" for word in KNOWN_WORDS if word not in there]

    def situation(self) -> TrainingSituation:
        """Return the situation that the options and the run describe."""
        from hocket.cli.checking import check_run
        from hocket.plan.models import model_of

        base = self.base
        placement = self._placement()
        asked = model_asked(self.params, self.model)
        if asked is None and not self.names_task:
            raise UserError(
                "the model is missing: give --params 25M, --model module:function, task=NAME, or a run's folder"
            )
        model = model_of(check_run(base).model) if asked is None else asked[1]
        ranks = placement.size * base.island.ranks
        if base.delays is not None:
            try:
                base.delays.check_size(ranks)
            except ValueError as error:
                raise UserError(f"--late among {ranks} ranks: {error}") from error
        is_named = self.optimizer is not None or (self.target is not None and os.path.exists(self.target))
        by_accuracy = is_named and base.optimizer.class_name == "sgd"
        return TrainingSituation(
            model,
            placement,
            base.network,
            self._step_s(),
            base.delays,
            base.seed,
            by_accuracy,
            self.measure,
            base.island,
        )

    def _placement(self) -> Placement:
        if self.hosts is None and self.base.ranks is None:
            raise UserError("--hosts is missing: name the ranks' hosts, such as 8x1 for 8 hosts of one rank")
        size = self.base.island.ranks
        counts = [size] * ((self.base.ranks or 0) // size)
        if self.hosts is None and self.base.ranks and self.base.ranks % size:
            self.base.check_size(self.base.ranks)
        if self.hosts is not None:
            counts = [host.ranks for host in parse_hosts(self.hosts)]
        placement = placed(self.base, counts)
        if placement.size < 2:
            what = "rank" if size == 1 else f"island of {size} ranks"
            raise UserError(f"--hosts: a single {what} exchanges nothing: name two or more")
        return placement

    def _step_s(self) -> float:
        """Return the seconds that a step computes: of `--step`, of the run, or measured."""
        if self.step is None and not self.base.compute.step_s and self.measure and self.names_task:
            return _measured_step_s(self.base)
        step_s = self.base.compute.step_s if self.step is None else read("--step", seconds, self.step)
        if self.step is None and not step_s:
            raise UserError(
                "--step is missing: give the time that a step computes, such as 200ms; with a task, --measure "
                "measures it"
            )
        if step_s == 0:
            raise UserError("--step: a step computes for more than 0 s")
        return step_s

    def candidates(self, situation: TrainingSituation) -> tuple[list[AdvisedStrategy], dict[str, str]]:
        """Return the strategies to compare, and the reasons by name of those that are left out."""
        found: list[AdvisedStrategy] = []
        left: dict[str, str] = {}
        self.registry.load_installed()
        for recipe in self.registry.recipes():
            try:
                found += self._of_recipe(recipe.name, situation)
            except HocketError as error:
                left[recipe.name] = _needed_package(error) or str(error)
        if self.target is not None:
            try:
                found = self._with_own(found, situation)
            except HocketError as error:
                left[Path(self.target).name] = str(error)
        return found, left

    def _of_recipe(self, name: str, situation: TrainingSituation) -> list[AdvisedStrategy]:
        from hocket.strategy.compose import compose

        run = load_run(self.based_on(name), self.of_run, registry=self.registry)
        about = run if self.target is None else load_run(name, registry=self.registry)
        is_exact = about.changes.startswith("nothing")
        is_measured = is_exact or about.loss_percent is not None or about.accuracy_points is not None
        if run.engine != self.base.engine or not run.strategy.exchanges or not (is_measured or self.all):
            return []
        needed = about.optimizer.class_name
        is_usual = needed in (*_USUAL, self.base.optimizer.class_name)
        if not (is_usual or self.all):
            raise UserError(f"it needs another optimizer: --optimizer {needed}")
        strategy = compose(run.strategy, *about.measured_with, registry=self.registry)
        notes = (about.changes, about.accuracy and f"elsewhere: {about.accuracy}; {about.measured_on}")
        names = [name, *about.measured_with]
        shown = ", ".join([name, *map(_last_key, about.measured_with)])
        costs = (about.loss_percent, about.accuracy_points) if is_usual else (None, None)
        known = tuple(filter(None, notes))
        candidate = AdvisedStrategy(shown, " ".join(names), strategy, is_exact, False, *costs, known)
        return [self._checked(candidate, run, situation)]

    def _with_own(
        self, found: Sequence[AdvisedStrategy], situation: TrainingSituation
    ) -> list[AdvisedStrategy]:
        """Return the candidates with the user's own strategy, unless it exchanges nothing."""
        assert self.target is not None
        run = load_run(self.target, self.overrides, registry=self.registry)
        if run.engine != self.base.engine:
            raise UserError(f"engine {run.engine.name} is not compared here: `hocket plan` plans it")
        reached = [each.step for each in run.strategy.in_phases if each.step < (run.steps or math.inf)]
        strategy = run.strategy.at(reached[-1])
        if not strategy.exchanges:
            return [*found]
        if any(each.strategy == strategy for each in found):
            return [replace(each, is_own=each.is_own or each.strategy == strategy) for each in found]
        name = ", ".join([_name_of(self.target), *map(_last_key, self.of_strategy)])
        if reached[-1]:
            name += f", from step {reached[-1]} on"
        own = AdvisedStrategy(name, " ".join([self.target, *self.of_strategy]), strategy, is_own=True)
        return [*found, self._checked(own, run, situation)]

    def _checked(
        self, candidate: AdvisedStrategy, run: RunConfig, situation: TrainingSituation
    ) -> AdvisedStrategy:
        """Return a candidate that works here.

        Raises:
            HocketError: it does not work here; gives the reason, and the setting with which it would, if there is one.
        """
        from hocket.cli.checking import check_run

        optimizer = run.optimizer if self.optimizer is None else self.base.optimizer
        check_run(replace(run, optimizer=optimizer, strategy=candidate.strategy))
        situation.plan(candidate.strategy)
        if (idle := situation.idle(candidate.strategy)) and not candidate.is_own:
            raise UserError(f"no two ranks take part in {idle}, without which it is a simpler strategy")
        return candidate


def _file_or_recipe(target: str, registry: Registry) -> str:
    """Return the file of the run in a folder, or else the file or recipe that a word names."""
    path = Path(target)
    if os.path.isfile(path / CONFIG):
        read_config(path / CONFIG)
        return str(path / CONFIG)
    if not os.path.isfile(path):
        try:
            registry.recipe_file(target)
        except ConfigError as error:
            raise UserError(
                f"{target}: neither a YAML file nor the folder of a run ({CONFIG} is missing), and {error}"
            ) from error
    return target


def _name_of(target: str) -> str:
    path = Path(target)
    return path.parent.name if path.name == CONFIG else path.name


def _measured_step_s(base: RunConfig) -> float:
    """Measure the seconds of a step of the run's task on one rank."""
    settings: dict[str, object] = {
        "steps": _STEPS_MEASURED,
        "ranks": 1,
        "log_every": 1,
        "eval_every": None,
        "delays": None,
        "island": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.yaml"
        file.write_text(
            text_of_config({**resolved(base), "strategy": {}, "phases": {}, "checkpoint": {}, **settings})
        )
        command = [*own_python(), "-m", "hocket", "run", str(file), "-q", "-n", "1", "--out", f"{folder}/run"]
        process = subprocess.run(command, check=False, capture_output=True, text=True)
        if process.returncode:
            raise UserError(f"--measure: a step cannot be measured: {process.stderr.strip()}")
        rows = read_rows(Path(folder) / "run" / METRICS)
    return float(median(later["seconds"] - before["seconds"] for before, later in pairwise(rows)))


def delays_of(text: str) -> Delays:
    """Return the delays that a text such as 1x300ms@10% means.

    Raises:
        UserError: the text has another form.
    """
    found = re.fullmatch(r"(\d+)x([^@]+)(?:@(\d+\.?\d*)%)?", text)
    if found is None:
        raise UserError(
            f"--late: got {text!r}; allowed: 1x300ms (one rank, another in each step, is late by 0.3 s) or 1x300ms@10% "
            "(in a tenth of the steps); others as delays='{name: fixed, ranks: [0], seconds: 300ms}'"
        )
    late_s = read(f"--late {text}", seconds, found[2])
    try:
        return RandomSubset(int(found[1]), late_s, float(found[3] or 100) / 100)
    except ValueError as error:
        raise UserError(f"--late {text}: {error}") from error


def _last_key(override: str) -> str:
    """Return an override without the path to its last key."""
    path, _, value = override.partition("=")
    return f"{path.rpartition('.')[2]}={value if len(value) <= _LONGEST else '...'}"


def _needed_package(error: HocketError) -> str:
    """Return "needs hocket-eager" for an error about a plugin that is not installed."""
    found = re.search(r"plugin '(\w+)' is not installed", str(error))
    return f"needs hocket-{found[1]}" if found else ""
