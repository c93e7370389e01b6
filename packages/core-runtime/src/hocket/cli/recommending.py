"""`hocket recommend`: the strategies to try first, by predicted step and measured cost; no rank is started."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from hocket.cli.advice_text import as_json, show_advice, show_explanation
from hocket.cli.checking import check_run
from hocket.cli.network_options import model_asked
from hocket.cli.planned import placed, situation_of
from hocket.cli.rank_options import island_overrides
from hocket.config.settings import RunSettings
from hocket.config.source import OF_STRATEGIES, SLOTS, based_on, parse_override
from hocket.errors import HocketError, UserError
from hocket.launch.hosts import parse_hosts
from hocket.plan.advice import UNMEASURED, Advice, AdvisedStrategy, is_measured, predict
from hocket.plan.links import WITHIN_A_HOST
from hocket.plan.packing_time import packing_seconds
from hocket.plan.situation import TrainingSituation
from hocket.plugin import default_registry
from hocket.plugin.discovery import KNOWN_WORDS, TASKS
from hocket.results import CONFIG, SUMMARY
from hocket.results.history import read_summary
from hocket.results.kept_config import read_config
from hocket.results.script import is_of_script
from hocket.training.run import RunConfig, load_run

#: The optimizers with which costs were measured; a recipe that needs another one is compared where it is asked for.
_USUAL = ("sgd", "adamw")


def recommend_command(
    words: Sequence[str],
    params: str | None,
    model: str | None,
    hosts: str | None,
    *,
    measure: bool,
    everything: bool,
    explain: bool,
    in_json: bool,
    **settings: Sequence[str],
) -> None:
    """Carry out `hocket recommend`.

    Args:
        words: a recipe, or a run's file or folder, and overrides; the others are the options.
        settings: overrides that options give.

    Raises:
        UserError: a wrong argument or option.
    """
    asked = Asked(words, [*chain(*settings.values())])
    situation = asked.situation(params, model, hosts)
    strategies, left = asked.strategies(situation, measure, everything)
    by_accuracy = asked.names("optimizer") and asked.base.optimizer.class_name == "sgd"
    advice = Advice(situation, strategies, by_accuracy)
    absent = [f"hocket-{word}" for word in KNOWN_WORDS if word not in (TASKS, *asked.registry.installed())]
    rows = advice.rows if everything else advice.shown()
    if in_json:
        print(json.dumps(as_json(advice, left), indent=1))
        return
    show_advice(advice, rows, len(absent))
    if explain:
        show_explanation(advice, rows, left | dict.fromkeys(absent, "not installed"))


class Asked:
    """The run that `hocket recommend` is asked about.

    Attributes:
        registry: of the recipes.
        target: a recipe, or the file of a run; None for the defaults.
        of_strategy: overrides of the target's strategy.
        of_run: overrides of the run that all strategies get.
        params: number of parameters of a script's run, as text; None for others.
        base: the run with synchronous SGD.
    """

    def __init__(self, words: Sequence[str], settings: Sequence[str]) -> None:
        """Read the run.

        Args:
            words: a recipe, or a run's file or folder, and overrides.
            settings: further overrides.

        Raises:
            UserError: the run cannot be read, or an override is wrong.
        """
        targets = [word for word in words if "=" not in word or os.path.exists(word)]
        if len(targets) > 1:
            raise UserError(f"{' and '.join(targets)}: name one recipe, file or run, or none")
        overrides = [*(word for word in words if word not in targets), *settings]
        self.registry, self.target, self.params = default_registry(), next(iter(targets), None), None
        if targets and os.path.isfile(Path(targets[0], CONFIG)):
            self.target, self.params, measured = _of_folder(Path(targets[0]))
            overrides = [*measured, *overrides]
        keys = (*SLOTS, *OF_STRATEGIES)
        self.of_strategy = [each for each in overrides if parse_override(each).keys[0] in keys]
        self.of_run = [each for each in overrides if each not in self.of_strategy]
        if self.of_strategy and not self.target:
            raise UserError(
                f"{self.of_strategy[0]} needs a strategy to change: name a recipe or a file before it"
            )
        load_run(self.target or "sgd", overrides, registry=self.registry)
        self.base = self._run("sgd")

    def _run(self, strategy: str, overrides: Sequence[str] = ()) -> RunConfig:
        """Return the run with the strategy of a recipe or a file, and overrides of it."""
        target = strategy if self.target is None else based_on(self.target, strategy, self.registry)
        return load_run(target, [*self.of_run, *overrides], registry=self.registry)

    def names(self, key: str) -> bool:
        """Return whether a run's file or an override gives a setting."""
        return os.path.isfile(self.target or "") or any(each.startswith(key) for each in self.of_run)

    def situation(self, params: str | None, model: str | None, hosts: str | None) -> TrainingSituation:
        """Return the situation that the run and the options `--params`, `--model` and `--hosts` describe.

        Raises:
            UserError: an option is wrong or missing.
        """
        if hosts is None:
            raise UserError("--hosts is missing: name the ranks' hosts, such as 8x1 for 8 hosts of one rank")
        placement = placed(self.base, [host.ranks for host in parse_hosts(hosts)])
        ranks = placement.size * self.base.island.ranks
        base = replace(self.base, ranks=ranks)
        base.check_size(ranks)
        if placement.size < 2:
            raise UserError(
                f"--hosts: {base.island.count(ranks)} cannot exchange anything: name two or more hosts"
            )
        if len({*placement.hosts}) == 1:
            base = replace(base, network=WITHIN_A_HOST)
        given = model_asked(params or (None if model else self.params), model)
        if given is None and not self.names("task"):
            raise UserError(
                "the model is missing: give --params 25M, --model module:function, task=NAME, or a run"
            )
        if not base.compute.step_s:
            raise UserError(
                "--step: give the computing time of a step, more than 0 s, such as 200ms; or name the "
                "folder of a run, which has measured it"
            )
        return situation_of(base, check_run(base), placement, given)

    def strategies(
        self, situation: TrainingSituation, measure: bool, everything: bool
    ) -> tuple[list[AdvisedStrategy], dict[str, str]]:
        """Return the strategies to compare, and the reasons by name of recipes that are left out.

        Args:
            situation: the situation.
            measure: measure the computing of compressors.
            everything: compare recipes of unmeasured cost, too.

        Raises:
            HocketError: the user's own strategy does not work here.
        """
        found: list[AdvisedStrategy] = []
        left: dict[str, str] = {}
        self.registry.load_installed()
        for recipe in self.registry.recipes():
            try:
                about = load_run(recipe.name, registry=self.registry)
                if everything or is_measured(about):
                    found.append(self._advised(recipe.name, about.measured_with, situation, measure, about))
            except HocketError as error:
                package = re.search(r"plugin '(\w+)' is not installed", str(error))
                left[recipe.name] = f"needs hocket-{package[1]}" if package else str(error)
        if self.target:
            own = self._advised(self.target, self.of_strategy, situation, measure)
            rows = [row for row in found if row.strategy == own.strategy] or [own]
            found = [row for row in found if row not in rows] + [replace(row, is_own=True) for row in rows]
        exchanging = (row for row in found if row.strategy.exchanges)
        return sorted(exchanging, key=lambda row: row.prediction.step_s), left

    def _advised(
        self,
        target: str,
        with_: Sequence[str],
        situation: TrainingSituation,
        measure: bool,
        about: RunSettings = UNMEASURED,
    ) -> AdvisedStrategy:
        """Return a strategy with its prediction.

        Raises:
            HocketError: it does not work here; gives the reason, and the setting with which it would, if there is one.
        """
        run = self._run(target, with_)
        [*_, last] = (each for each in run.strategy.in_phases if each.step < (run.steps or math.inf))
        for engine in (run.engine, about.engine):
            if engine != UNMEASURED.engine:
                raise UserError(
                    f"engine {engine.name} is not supported by `hocket recommend`: use `hocket plan`"
                )
        if (needed := about.optimizer.class_name) not in (*_USUAL, self.base.optimizer.class_name):
            raise UserError(f"it needs another optimizer: give optimizer={needed}")
        check_run(replace(run, strategy=last.strategy))
        if about is not UNMEASURED and (idle := situation.idle(last.strategy)):
            raise UserError(f"no two ranks take part in {idle}, so a simpler strategy does the same")
        file = Path(target)
        keys = [re.sub(r"^[^=]*\.", "", each) for each in with_]
        name = ", ".join([file.parent.name if file.name == CONFIG else file.name, *keys])
        name += f", from step {last.step} on" * (last.step > 0)
        costs = situation.plan(last.strategy)
        step_s, held_up_s = situation.settings.compute.step_s, situation.held_up_seconds(costs)
        prediction = predict(costs, step_s, held_up_s, packing_seconds(costs) if measure else 0.0)
        return AdvisedStrategy(name, " ".join([target, *with_]), last.strategy, prediction, about)


def _of_folder(folder: Path) -> tuple[str | None, str | None, list[str]]:
    """Return the file, the number of parameters of a script's run, and overrides with what a run measured."""
    config = read_config(folder / CONFIG)
    overrides: list[str] = []
    try:
        summary = read_summary(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    except ValueError as error:
        raise UserError(
            f"{folder / SUMMARY} is damaged ({error}): give --step, --params and --hosts, and no folder"
        ) from error
    # A speed of None or 0 is that of a run in which no step was timed.
    if (speed := summary.get("steps_per_second")) and not config.get("compute", {}).get("step_s"):
        overrides = [f"compute.step_s={(1 - summary['exposed_wait_fraction']) / speed:.6g}"]
    if not is_of_script(config):
        return str(folder / CONFIG), None, overrides
    if not summary:
        raise UserError(f"{folder}: the script's run has not ended: give --params and --step, and no folder")
    ranks = config["ranks"]
    overrides += island_overrides(ranks // summary.get("islands", ranks))
    return None, str(summary["parameters"]), overrides
