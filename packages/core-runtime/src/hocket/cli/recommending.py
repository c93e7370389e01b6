"""`hocket recommend`: the strategies to try first, by predicted step and measured cost; no rank is started."""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from hocket.cli.checking import check_run
from hocket.cli.network_options import GivenModel, model_asked
from hocket.cli.plan_text import ASSUMED_OVERLAP, assumptions, ranks_of, title
from hocket.cli.planned import placed_run, situation_of
from hocket.cli.printing import say, say_command
from hocket.cli.rank_options import island_overrides
from hocket.cli.table import show_table
from hocket.config.settings import RunSettings
from hocket.config.source import OF_STRATEGIES, SLOTS, based_on, parse_override
from hocket.errors import HocketError, UserError
from hocket.launch.hosts import parse_hosts
from hocket.plan.advice import CHOICE, ERROR, UNMEASURED, Advice, AdvisedStrategy, is_exact, predict
from hocket.plan.links import WITHIN_A_HOST
from hocket.plan.situation import TrainingSituation
from hocket.plugin import default_registry
from hocket.plugin.discovery import KNOWN_WORDS, TASKS
from hocket.quantities import format_bits_per_second, format_bytes, format_count, format_seconds
from hocket.results import CONFIG, SUMMARY
from hocket.results.history import read_summary
from hocket.results.kept_config import read_config
from hocket.results.script import is_of_script
from hocket.training.run import RunConfig, load_run

#: The optimizers with which costs were measured; a recipe that needs another one is compared where it is asked for.
_USUAL = ("sgd", "adamw")
_ASSUMED = (
    f"Exchanges take the time that `hocket plan` shows, one at a time. {ASSUMED_OVERLAP} Compressing takes "
    "none. Ranks wait for late ones, except in partial collectives (eager).",
    f"{CHOICE} Costs were measured on other models (docs/atlas): measure yours with `hocket sweep` and `hocket "
    "compare`.",
)
#: The reason by which a package is left out.
_NOT_INSTALLED = "not installed"
#: Columns within which the answer takes 15 lines, and those of a strategy's name.
_NARROW, _NAME = 80, 30
_HEADERS = ("", "strategy", "step", "faster", "against sgd", "sent/step")


def recommend_command(
    words: Sequence[str],
    params: str | None,
    model: str | None,
    hosts: str,
    *,
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
    own, of_run, size = _words(words, [*chain(*settings.values())])
    advice = _advice(own, of_run, hosts, model_asked(params or (None if model else size), model), everything)
    rows = advice.rows if everything else advice.shown()
    if in_json:
        print(json.dumps(_as_json(advice), indent=1))
        return
    _show_advice(advice, rows)
    if explain:
        _show_explanation(advice, rows)


def _words(words: Sequence[str], settings: Sequence[str]) -> tuple[list[str], list[str], str | None]:
    """Return the user's own strategy, the run's overrides, and the number of parameters of a script's run.

    The strategy is a recipe or a file, and its overrides; it is empty if none is named.

    Raises:
        UserError: several are named, or overrides of none.
    """
    own = [word for word in words if "=" not in word or os.path.exists(word)]
    overrides, size = [*(word for word in words if word not in own), *settings], None
    if len(own) == 1 and os.path.isfile(Path(own[0], CONFIG)):
        own, measured, size = _of_folder(Path(own[0]))
        overrides = [*measured, *overrides]
    of_strategies = (*SLOTS, *OF_STRATEGIES)
    of_own = [each for each in overrides if parse_override(each).keys[0] in of_strategies]
    of_run = [each for each in overrides if each not in of_own]
    if len(own) > 1 or (of_own and not own):
        raise UserError(
            f"{' and '.join(own or of_own)}: name at most one recipe, file or run, and its overrides after it"
        )
    return [*own, *of_own], of_run, size


def _of_folder(folder: Path) -> tuple[list[str], list[str], str | None]:
    """Return a run's file, overrides with what the run measured, and a script's number of parameters."""
    config, measured = read_config(folder / CONFIG), []
    try:
        summary = read_summary(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    except ValueError as error:
        raise UserError(
            f"{folder / SUMMARY} is damaged ({error}): give --step and --params, and no folder"
        ) from error
    # A speed of None or 0 is that of a run in which no step was timed.
    if (speed := summary.get("steps_per_second")) and not config.get("compute", {}).get("step_s"):
        measured = [f"compute.step_s={(1 - summary['exposed_wait_fraction']) / speed:.6g}"]
    if not is_of_script(config):
        return [str(folder / CONFIG)], measured, None
    if not summary:
        raise UserError(f"{folder}: the script's run has not ended: give --params and --step, and no folder")
    island = config["ranks"] // summary.get("islands", config["ranks"])
    return [], [*measured, *island_overrides(island)], str(summary["parameters"])


def _situation(
    target: str, overrides: Sequence[str], hosts: str, given: GivenModel | None
) -> TrainingSituation:
    """Return the situation of a run with these overrides, and the settings of a file.

    Raises:
        UserError: an override or an option is wrong or missing.
    """
    run, placement = placed_run(_run("sgd", target, overrides), None, parse_hosts(hosts))
    if placement.size < 2:
        raise UserError("--hosts: one replica cannot exchange anything: name two or more hosts")
    if len({*placement.hosts}) == 1:
        run = replace(run, network=WITHIN_A_HOST)
    if given is None and not _names("task", target, overrides):
        raise UserError(
            "the model is missing: give --params 25M, --model module:function, task=NAME, or a run"
        )
    if not run.compute.step_s:
        raise UserError("--step: give the computing time of a step, such as 200ms, or a run")
    return situation_of(run, check_run(run), placement, given)


def _run(recipe: str, target: str, overrides: Sequence[str]) -> RunConfig:
    """Return the run of a recipe with overrides, and the settings of a file."""
    return load_run(based_on(target, recipe, default_registry()), overrides)


def _names(key: str, target: str, overrides: Sequence[str]) -> bool:
    """Return whether a run's file or an override gives a setting."""
    return os.path.isfile(target) or any(each.startswith(key) for each in overrides)


def _advice(
    own: Sequence[str], overrides: Sequence[str], hosts: str, given: GivenModel | None, everything: bool
) -> Advice:
    """Compare the strategies.

    Args:
        own: the user's recipe or file, and its overrides; empty for none.
        overrides: those of the run.
        hosts, given: as of `_situation`.
        everything: compare recipes of unmeasured cost, too.

    Raises:
        HocketError: an override or an option is wrong, or the user's own strategy does not work here.
    """
    target = own[0] if own else "sgd"
    named = load_run(target, [*overrides, *own[1:]])  # what is wrong with it comes first
    situation = _situation(target, overrides, hosts, given)
    found, left = _recipes(target, overrides, situation, everything)
    if own:
        row = _advised(own, named, situation, UNMEASURED)
        same = [each for each in found if each.strategy == row.strategy] or [row]
        found = [each for each in found if each not in same] + [replace(each, is_own=True) for each in same]
    exchanging = (row for row in found if row.strategy.exchanges)
    rows = sorted(exchanging, key=lambda row: row.prediction.step_s)
    is_sgd = situation.settings.optimizer.class_name == "sgd"
    return Advice(situation, rows, is_sgd and _names("optimizer", target, overrides), left)


def _recipes(
    target: str, overrides: Sequence[str], situation: TrainingSituation, everything: bool
) -> tuple[list[AdvisedStrategy], dict[str, str]]:
    """Return the recipes that work here, and reasons by the names of the others, and of packages."""
    registry, optimizer = default_registry(), situation.settings.optimizer.class_name
    registry.load_installed()
    found: list[AdvisedStrategy] = []
    left: dict[str, str] = {}
    for recipe in registry.recipes():
        try:
            about = load_run(recipe.name, registry=registry)
            if (needed := about.optimizer.class_name) not in (*_USUAL, optimizer):
                raise UserError(f"it needs another optimizer: give optimizer={needed}")
            if everything or is_exact(about) or {about.loss_percent, about.accuracy_points} != {None}:
                run = _run(recipe.name, target, [*overrides, *about.measured_with])
                found.append(_advised([recipe.name, *about.measured_with], run, situation, about))
        except HocketError as error:
            package = re.search(r"plugin '(\w+)' is not installed", str(error))
            left[recipe.name] = f"needs hocket-{package[1]}" if package else str(error)
    absent = {*KNOWN_WORDS} - {TASKS, *registry.installed()}
    return found, left | {f"hocket-{word}": _NOT_INSTALLED for word in KNOWN_WORDS if word in absent}


def _advised(
    words: Sequence[str], run: RunConfig, situation: TrainingSituation, about: RunSettings
) -> AdvisedStrategy:
    """Return a run's strategy with its prediction.

    Args:
        words: the recipe or file, and its overrides.
        run: the run.
        situation: the situation.
        about: the settings of the recipe, if it is one.

    Raises:
        HocketError: it does not work here; says why.
    """
    [*_, last] = (each for each in run.strategy.in_phases if each.step < (run.steps or math.inf))
    for engine in (run.engine, about.engine):  # a run's file may give another than its recipe
        if engine != UNMEASURED.engine:
            raise UserError(f"engine {engine.name} is not supported by `hocket recommend`: use `hocket plan`")
    check_run(replace(run, strategy=last.strategy))
    if about is not UNMEASURED and (idle := situation.idle(last.strategy)):
        raise UserError(f"no two ranks take part in {idle}, so a simpler strategy does the same")
    file = Path(words[0])
    own = file.parent.name if file.name == CONFIG else file.name
    name = ", ".join([own, *(re.sub(r"^[^=]*\.", "", each) for each in words[1:])])
    name += f", from step {last.step} on" * (last.step > 0)
    plan = situation.plan(last.strategy)
    prediction = predict(plan, situation.settings.compute.step_s, situation.held_up_seconds(plan))
    return AdvisedStrategy(name, " ".join(words), last.strategy, prediction, about)


def _show_advice(advice: Advice, rows: Sequence[AdvisedStrategy]) -> None:
    """Print the situation, a table of these rows, the command to try first, and the predictions' error."""
    settings, plain, best = advice.situation.settings, advice.plain, advice.best
    costs, step_s = advice.situation.plan(plain.strategy), plain.prediction.step_s
    link = f", {format_bits_per_second(settings.network.bandwidth_bits_per_s)}"
    head = (
        f"{ranks_of(settings, advice.situation.placement)}"
        f"{' on one host' if settings.network == WITHIN_A_HOST else link}, "
        f"{format_count(costs.num_parameters)} parameters ({format_bytes(costs.model_bytes)}), "
        f"{format_seconds(settings.compute.step_s)} of computing"
        + ("" if settings.delays is None else f"; late ranks: {title(settings.delays)}")
    )
    waits = (plain.prediction.exposed_s + plain.prediction.held_up_s) / step_s
    takes = f"Plain allreduce (DDP) is predicted to take {format_seconds(step_s)} a step, {waits:.0%} of it waiting."
    say([head, takes], bullet="")
    print()
    show_table(_HEADERS, [_cells(advice, row) for row in rows], numbers=_HEADERS[2:], drawn=False)
    if len(head) <= _NARROW:  # else the lines above are one more
        print()
    if best is plain:
        print("Plain allreduce (agd, DDP) is best here: nothing faster is worth its cost.")
    else:
        strategies = f"strategy=agd,{best.spelled}"
        say_command("Try first: ", f"hocket sweep --script train.py -n {advice.situation.ranks}", strategies)
        print("Costs are of training from scratch; synchronous_steps=N lowers DiLoCo's.")
    absent = [*advice.left_out.values()].count(_NOT_INSTALLED)
    missing = f"; not installed: {absent} packages (hocket plugins)" if absent else ""
    error = f"Predictions are within {ERROR} x, without compressing{_level(advice, best)}."
    say([error, f"More: --explain, --all, --json{missing}"], bullet="")


def _cells(advice: Advice, row: AdvisedStrategy) -> tuple[str, ...]:
    loss, accuracy = row.about.loss_percent, row.about.accuracy_points
    cost = "not measured" if accuracy is None else f"accuracy {accuracy:+.1f}"
    if loss is not None and not (advice.by_accuracy and accuracy is not None):
        cost = f"loss {loss:+.1f} %"
    return (
        "*" if row is advice.best else "",
        textwrap.fill(row.name, _NAME, subsequent_indent="  ", break_on_hyphens=False),
        format_seconds(row.prediction.step_s),
        f"{advice.faster(row):,.1f} x",
        "same" if is_exact(row.about) else cost,
        format_bytes(row.prediction.bytes_per_step),
    )


def _level(advice: Advice, row: AdvisedStrategy) -> str:
    """Return the bandwidth from which plain allreduce is as fast as a row; empty on one host."""
    if row is advice.plain or advice.situation.settings.network == WITHIN_A_HOST:
        return ""
    level = advice.least_bandwidth(row)
    return f"; DDP is as fast {'on no network' if level is None else f'from {format_bits_per_second(level)}'}"


def _notes(row: AdvisedStrategy) -> list[str]:
    """Return what a row changes, and the cost in other tests."""
    about = row.about
    elsewhere = f"elsewhere: {about.accuracy}; {about.measured_on}" if about.accuracy else ""
    return [note for note in (about.changes, elsewhere) if note]


def _show_explanation(advice: Advice, rows: Sequence[AdvisedStrategy]) -> None:
    """Print what the rows change, what that cost in which test, and what predictions assume."""
    situation = advice.situation
    for row in rows:
        costs = row.prediction
        parts = {"waits": costs.exposed_s, "is held up": costs.held_up_s}
        times = ", ".join(f"{what} for {format_seconds(time)}" for what, time in parts.items() if time)
        memory = f"a step {times or 'only computes'}; buffers take {format_bytes(costs.memory_bytes)}"
        print(f"\n{row.name}")
        say([*_notes(row), memory + _level(advice, row)], bullet="  - ")
    print("\nLeft out:")
    say(f"{name}: {why}" for name, why in advice.left_out.items())
    print("\nAssumed:")
    plan = situation.plan(advice.best.strategy)
    say([*_ASSUMED, *assumptions(situation.settings, situation.placement, plan)])


def _as_json(advice: Advice) -> dict[str, object]:
    """Return all rows, the best one and the reasons of strategies that are left out, as data."""
    return {
        "compute_s": advice.situation.settings.compute.step_s,
        "best": advice.best.name,
        "best_is_level_from_bits_per_s": advice.least_bandwidth(advice.best),
        "strategies": [
            {
                "strategy": row.name,
                **asdict(row.prediction),
                "faster": advice.faster(row),
                "same_result": is_exact(row.about),
                "loss_percent": row.about.loss_percent,
                "accuracy_points": row.about.accuracy_points,
                "notes": _notes(row),
            }
            for row in advice.rows
        ],
        "left_out": advice.left_out,
    }
