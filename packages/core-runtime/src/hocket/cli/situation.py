"""The situation and the strategies that `hocket recommend` is asked about."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from hocket.cli.checking import check_run
from hocket.cli.network_options import model_asked
from hocket.cli.planned import placed, situation_of
from hocket.cli.rank_options import island_overrides
from hocket.config.settings import RunSettings
from hocket.config.source import SLOTS, based_on, parse_override
from hocket.delays import RandomSubset
from hocket.errors import ConfigError, HocketError, UserError
from hocket.plain import TreeView
from hocket.plan.advice import UNMEASURED, AdvisedStrategy, measured_cost, predict
from hocket.plan.packing_time import packing_seconds
from hocket.plan.situation import TrainingSituation
from hocket.plugin import Registry
from hocket.quantities import read, seconds
from hocket.results import CONFIG, METRICS, SUMMARY
from hocket.results.history import read_rows, read_summary
from hocket.results.kept_config import read_config, text_of_config
from hocket.results.script import is_of_script
from hocket.training.run import RunConfig, load_run, resolved
from hocket.transport.hosts import parse_hosts
from hocket.transport.rank_process import own_python

#: Longer values of overrides are left out of a strategy's name.
_LONGEST = 20
_STRATEGY_KEYS = (*SLOTS, "strategy", "phases", "recipe")
#: The optimizers with which costs were measured; a recipe that needs another one is compared where it is asked for.
_USUAL = ("sgd", "adamw")
#: The settings with which a run's steps are measured.
_MEASURED: TreeView = {
    "steps": 30,
    "ranks": 1,
    "transport": "torch",
    "log_every": 1,
    "eval_every": None,
    "checkpoint": {},
    "delays": None,
    "island": {},
}


class Asked:
    """The run that `hocket recommend` is asked about.

    Attributes:
        registry: of the recipes.
        target: a recipe, or the file of a run; None for the defaults.
        of_strategy: overrides of the target's strategy.
        of_run: overrides of the run that all strategies get.
        params: the number of parameters, as text; None where a task or a function gives the model.
        measure: measure the computing of a step, if it is not given, and that of compressors.
        everything: compare recipes of unmeasured cost, too.
        base: the run with synchronous SGD.
    """

    def __init__(
        self,
        registry: Registry,
        target: str | None,
        overrides: Sequence[str],
        params: str | None = None,
        *,
        measure: bool = False,
        everything: bool = False,
    ) -> None:
        """Read the run.

        Raises:
            UserError: the run cannot be read, or an override is wrong.
        """
        self.registry, self.params, self.measure, self.everything = registry, params, measure, everything
        self.target = target
        config = Path(target or "") / CONFIG
        if target is not None and os.path.isfile(config):
            self.target = str(config)
            if is_of_script(read_config(config)):
                size, of_script = _script_run(config.parent)
                self.target, self.params, overrides = None, params or size, [*of_script, *overrides]
        elif target is not None and not os.path.isfile(target):
            try:
                registry.recipe_file(target)
            except ConfigError as error:
                raise UserError(
                    f"{target} is neither a YAML file nor the folder of a run ({CONFIG} is missing), and {error}"
                ) from error
        self.of_strategy = [each for each in overrides if parse_override(each).keys[0] in _STRATEGY_KEYS]
        self.of_run = [each for each in overrides if each not in self.of_strategy]
        if self.of_strategy and self.target is None:
            raise UserError(
                f"{self.of_strategy[0]} changes one strategy: name it, such as `hocket recommend diloco "
                "parameters.0.every=30`, or a file"
            )
        self.base = self._run("sgd")

    def _run(self, strategy: str, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the run with the strategy of a recipe or a file, and overrides of it."""
        target = strategy if self.target is None else based_on(self.target, strategy, self.registry)
        return load_run(target, [*self.of_run, *overrides], registry=self.registry)

    def names(self, key: str) -> bool:
        """Return whether a run's file or an override gives a setting."""
        return os.path.isfile(self.target or "") or any(each.startswith(key) for each in self.of_run)

    def situation(self, model: str | None, hosts: str | None) -> TrainingSituation:
        """Return the situation that the run and the options `--model` and `--hosts` describe.

        Raises:
            UserError: an option is wrong or missing.
        """
        base, task = self.base, check_run(self.base)
        if hosts is None and base.ranks is None:
            raise UserError("--hosts is missing: name the ranks' hosts, such as 8x1 for 8 hosts of one rank")
        island = base.island.ranks
        on_hosts = [host.ranks for host in parse_hosts(hosts)] if hosts else []
        ranks = sum(on_hosts) or base.ranks or 0
        base.check_size(ranks)
        placement = placed(base, on_hosts or [island] * (ranks // island))
        if placement.size < 2:
            what = "rank" if island == 1 else f"island of {island} ranks"
            raise UserError(f"--hosts: a single {what} exchanges nothing: name two or more")
        given = model_asked(self.params, model)
        if given is None and not self.names("task"):
            raise UserError(
                "the model is missing: give --params 25M, --model module:function, task=NAME, or a run's folder"
            )
        step_s = base.compute.step_s
        if not step_s and self.measure and self.names("task"):
            step_s = _measured_step_s(base)
        if not step_s:
            raise UserError(
                "--step: give the time that a step computes, more than 0 s, such as 200ms; with a task, --measure "
                "measures it"
            )
        settings = replace(base, compute=replace(base.compute, step_s=step_s))
        return situation_of(settings, task, placement, given)

    def strategies(self, situation: TrainingSituation) -> tuple[list[AdvisedStrategy], dict[str, str]]:
        """Return the strategies to compare, and the reasons by name of recipes that are left out.

        Raises:
            HocketError: the user's own strategy does not work here.
        """
        found: list[AdvisedStrategy] = []
        left: dict[str, str] = {}
        self.registry.load_installed()
        for recipe in self.registry.recipes():
            try:
                found += self._of_recipe(recipe.name, situation)
            except HocketError as error:
                package = re.search(r"plugin '(\w+)' is not installed", str(error))
                left[recipe.name] = f"needs hocket-{package[1]}" if package else str(error)
        for own in [] if self.target is None else self._advised(self.target, self.of_strategy, situation):
            same = [each for each in found if each.strategy == own.strategy]
            others = [each for each in found if each not in same]
            found = [*others, *(replace(each, is_own=True) for each in same or [own])]
        return found, left

    def _of_recipe(self, name: str, situation: TrainingSituation) -> Iterator[AdvisedStrategy]:
        """Yield a recipe's strategy, with the settings of its test, if it is one to compare."""
        about = load_run(name, registry=self.registry)
        is_measured = min(measured_cost(about, by_accuracy) for by_accuracy in (True, False)) < math.inf
        if not (is_measured or self.everything):
            return
        if about.engine != self.base.engine:
            raise UserError(f"engine {about.engine.name} is not compared here: use `hocket plan`")
        needed = about.optimizer.class_name
        if needed not in (*_USUAL, self.base.optimizer.class_name):
            if not self.everything:
                raise UserError(f"it needs another optimizer: give --optimizer {needed}")
            about = replace(about, loss_percent=None, accuracy_points=None)
        for advised in self._advised(name, about.measured_with, situation, about):
            if idle := situation.idle(advised.strategy):
                raise UserError(f"no two ranks take part in {idle}, so it would be a simpler strategy")
            yield advised

    def _advised(
        self,
        target: str,
        overrides: Sequence[str],
        situation: TrainingSituation,
        about: RunSettings = UNMEASURED,
    ) -> Iterator[AdvisedStrategy]:
        """Yield a strategy that works here, with its prediction, unless it exchanges nothing.

        Raises:
            HocketError: it does not work here; gives the reason, and the setting with which it would, if there is one.
        """
        run = self._run(target, overrides)
        [*_, last] = (each for each in run.strategy.in_phases if each.step < (run.steps or math.inf))
        if run.engine != self.base.engine:
            raise UserError(f"engine {run.engine.name} is not compared here: use `hocket plan`")
        if not last.strategy.exchanges:
            return
        check_run(replace(run, strategy=last.strategy))
        costs = situation.plan(last.strategy)
        packing_s = packing_seconds(costs) if self.measure else 0.0
        held_up_s = situation.held_up_seconds(costs)
        prediction = predict(costs, situation.settings.compute.step_s, held_up_s, packing_s)
        file = Path(target)
        name = ", ".join([file.parent.name if file.name == CONFIG else file.name, *map(_last_key, overrides)])
        name += f", from step {last.step} on" * (last.step > 0)
        yield AdvisedStrategy(name, " ".join([target, *overrides]), last.strategy, prediction, about)


def _script_run(folder: Path) -> tuple[str, list[str]]:
    """Return the model's size of a script's run, and its ranks, islands and computing of a step as overrides."""
    if not (folder / SUMMARY).is_file():
        raise UserError(
            f"{folder}: the script's run has not ended: its steps and its model's size are not known yet"
        )
    ranks, summary = read_config(folder / CONFIG)["ranks"], read_summary(folder / SUMMARY)
    overrides = [f"ranks={ranks}", *island_overrides(ranks // summary.get("islands", ranks))]
    if speed := summary["steps_per_second"]:  # None or 0 where no step was timed
        overrides.append(f"compute.step_s={(1 - summary['exposed_wait_fraction']) / speed:.6g}")
    return str(summary["parameters"]), overrides


def _measured_step_s(base: RunConfig) -> float:
    """Measure the seconds of a step of the run's task on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "measured.yaml", Path(folder) / "run"
        file.write_text(text_of_config({**resolved(base), **_MEASURED}))
        command = [*own_python(), "-m", "hocket", "run", str(file), "-q", "-n", "1", "--out", str(out)]
        process = subprocess.run(command, check=False, capture_output=True, text=True)
        if process.returncode:
            raise UserError(f"--measure: the step could not be measured: {process.stderr.strip()}")
        rows = read_rows(out / METRICS)
    return float(median(later["seconds"] - before["seconds"] for before, later in pairwise(rows)))


def late_override(text: str) -> str:
    """Return a text such as 1x300ms@10% as an override of a run's file.

    Raises:
        UserError: the text has another form.
    """
    found = re.fullmatch(r"(\d+)x([^@]+)(?:@(\d+\.?\d*)%)?", text)
    if found is None:
        raise UserError(
            f"--late: got {text!r}; allowed: 1x300ms (one rank, drawn anew in each step, is 0.3 s late) or "
            f"1x300ms@10% (in a tenth of the steps); for other delays write delays='{{name: fixed, ranks: [0], "
            f"seconds: 300ms}}'"
        )
    late_s, fraction = read(f"--late {text}", seconds, found[2]), float(found[3] or 100) / 100
    try:
        RandomSubset(int(found[1]), late_s, fraction)
    except ValueError as error:
        raise UserError(f"--late {text}: {error}") from error
    return f"delays={{name: random_subset, count: {found[1]}, seconds: {late_s!r}, fraction: {fraction!r}}}"


def _last_key(override: str) -> str:
    """Return an override without the path to its last key."""
    path, _, value = override.partition("=")
    return f"{path.rpartition('.')[2]}={value if len(value) <= _LONGEST else '...'}"
