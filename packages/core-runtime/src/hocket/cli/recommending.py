"""`hocket recommend`: strategies ranked by what a step is predicted to take; no rank is started."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.cli.planning import MATRICES, title
from hocket.cli.recommend_options import Asked
from hocket.cli.situation import (
    base_of,
    based_on_asked,
    delays_among,
    file_or_recipe,
    model_asked,
    placement_of,
    step_seconds,
)
from hocket.cli.table import format_bytes, format_seconds, show_table
from hocket.errors import AttachError, HocketError, UserError
from hocket.installing import how_to_install
from hocket.plan.advice import CLOSE, PLAIN, Prediction, least_bandwidth, most_hosts, predict
from hocket.plan.links import WITHIN_A_HOST
from hocket.plugin import Registry, default_registry
from hocket.plugin.discovery import KNOWN_WORDS, TASKS
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, load_run

if TYPE_CHECKING:
    from torch import nn

    from hocket.delays import Delays
    from hocket.plan.plan import Plan
    from hocket.strategy.strategy import Strategy

__all__ = ["recommend_command"]

_TEXT_WIDTH = 110
#: The numbers of hosts that are looked at for what plain allreduce is good for.
_HOSTS = tuple(2**power for power in range(1, 8))
_SYNCHRONOUS = "sgd"
_UNKNOWN, _NOTHING = "not measured", "nothing"


@dataclass(frozen=True)
class _Candidate:
    """A strategy that could be taken.

    Attributes:
        name: a recipe's, with what of it is changed; or the file's.
        run: with all that was asked for.
        strategy: that of the last phase that the run reaches.
        recipe: the recipe whose words and test are of this strategy; None where nobody has measured it.
        base: the recipe that it changes, where it has no other.
        override: what has to be set for it to work here; empty for nothing.
        start: the share of the run's steps before the last phase, by strategy; empty where the file does not say.
    """

    name: str
    run: RunConfig
    strategy: Strategy
    recipe: RunConfig | None = None
    base: RunConfig | None = None
    override: str = ""
    start: tuple[tuple[float, Strategy], ...] = ()

    @property
    def loses_nothing(self) -> bool:
        """Whether a step gives the mean of all gradients, as it is known."""
        return self.recipe is not None and self.recipe.changes.startswith(_NOTHING)

    @property
    def test(self) -> str:
        """What says how accurate it is; empty where nothing does."""
        return self.recipe.measured_on if self.recipe is not None else ""

    @property
    def synchronous_fraction(self) -> float:
        """Of the steps of that test, how many were a plain allreduce's."""
        return self.recipe.synchronous_fraction if self.recipe is not None else 0.0

    @property
    def has_start(self) -> bool:
        """Whether its run, or that of the test, begins with another strategy."""
        return bool(self.start or self.synchronous_fraction)

    @property
    def strategies(self) -> dict[str, Strategy]:
        """Its own by its name, and those of its start by theirs."""
        start = {self.of_start(place): each for place, (_, each) in enumerate(self.start)}
        return {self.name: self.strategy, **start}

    def of_start(self, place: int) -> str:
        """Return what the strategy at a place of its start is called."""
        return f"{self.name}: start {place}"


class _Predictions:
    """What candidates are predicted to take, in this situation and in others; each is found once.

    Args:
        candidates: by name.
        model: with as many parameters as it has.
        base: of which the network is that of all.
        step_s: seconds that a step computes.
        delays: of late ranks.
        packing: seconds of a step that compressors compute, by strategy; empty where that is not measured.
    """

    def __init__(
        self,
        candidates: Sequence[_Candidate],
        model: nn.Module,
        base: RunConfig,
        step_s: float,
        delays: Delays | None,
        packing: Mapping[str, float],
    ) -> None:
        self.candidates = {each.name: each for each in candidates}
        self._strategies = {
            name: strategy for each in candidates for name, strategy in each.strategies.items()
        }
        self._model, self._base, self._step_s, self._delays = model, base, step_s, delays
        self._packing = packing
        self._found: dict[tuple[str, Placement, float], Prediction | None] = {}
        self._held_up: dict[tuple[str, Placement], float] = {}

    def of(self, name: str, where: Placement, bandwidth: float) -> Prediction | None:
        """Return it for links of so many bits a second; None for ranks among which the candidate is not possible."""
        key = (name, where, bandwidth)
        if key not in self._found:
            self._found[key] = self._predict(*key)
        return self._found[key]

    def as_tested(self, name: str, where: Placement, bandwidth: float) -> float | None:
        """Return the seconds of a step on average, begun as the file says, or as where accuracy was measured."""
        candidate = self.candidates[name]
        begun = [(fraction, candidate.of_start(place)) for place, (fraction, _) in enumerate(candidate.start)]
        if not begun and candidate.synchronous_fraction:
            begun = [(candidate.synchronous_fraction, _SYNCHRONOUS)]
        own = self.of(name, where, bandwidth)
        if own is None:
            return None
        average = own.step_s
        for fraction, other in begun:
            before = self.of(other, where, bandwidth)
            if before is None:
                return None
            average += fraction * (before.step_s - own.step_s)
        return average

    def is_level(self, name: str, where: Placement, bandwidth: float) -> bool:
        """Return whether plain allreduce takes as long as a candidate, or hardly longer."""
        plain, other = (self.as_tested(each, where, bandwidth) for each in (PLAIN, name))
        return plain is not None and other is not None and plain <= CLOSE * other

    def _predict(self, name: str, where: Placement, bandwidth: float) -> Prediction | None:
        from hocket.plan.plan import plan

        network = replace(self._base.network, bandwidth_bits_per_s=bandwidth)
        try:
            costs = plan(self._strategies[name], self._model, where, network)
        except HocketError:
            return None
        held_up_s = self._held_up_seconds(name, where, costs)
        return predict(costs, self._step_s, held_up_s, self._packing.get(name, 0.0))

    def _held_up_seconds(self, name: str, where: Placement, costs: Plan) -> float:
        """Return it from where it was found with another bandwidth, of which it knows nothing."""
        from hocket.plan.lateness import held_up_seconds

        if self._delays is None:
            return 0.0
        if (name, where) not in self._held_up:
            self._held_up[name, where] = held_up_seconds(costs, self._step_s, self._delays, self._base.seed)
        return self._held_up[name, where]


def recommend_command(asked: Asked) -> None:
    """Carry out `hocket recommend`.

    Raises:
        UserError: whatever is wrong with what was asked for.
    """
    registry = default_registry()
    if asked.of_strategy and asked.target is None:
        raise UserError(
            f"{asked.of_strategy[0]} changes one strategy: name it, such as `hocket recommend diloco "
            "parameters.0.every=30`, or a file"
        )
    base = base_of(asked, registry)
    placement = placement_of(asked, base)
    model = model_asked(asked, base)
    step_s = step_seconds(asked, base)
    delays = delays_among(base, placement)
    candidates, refused = _candidates(asked, base, registry, placement, model)

    from hocket.plan.plan import plan

    packing: dict[str, float] = {}
    if asked.measure:
        from hocket.plan.packing_time import packing_seconds

        packing = {
            name: packing_seconds(plan(strategy, model, placement, base.network))
            for each in candidates
            for name, strategy in each.strategies.items()
        }
    _show_head(base, placement, plan(base.strategy, model, placement, base.network), step_s, delays)
    predictions = _Predictions(candidates, model, base, step_s, delays, packing)
    shown = _show(predictions, placement, base.network.bandwidth_bits_per_s, delays, packing=asked.measure)
    _show_costs(shown)
    if refused:
        print("\nLeft out here:")
        _say([f"{name}: {why}" for name, why in refused])
    print()
    _say([*_absent(registry.installed()), *_assumptions(asked, placement, delays, shown)])


def _candidates(
    asked: Asked, base: RunConfig, registry: Registry, placement: Placement, model: nn.Module
) -> tuple[list[_Candidate], list[tuple[str, str]]]:
    """Return the strategies that could be taken, and those that are left out, with the reason."""
    found: list[_Candidate] = []
    refused = []
    registry.load_installed()
    recipes: list[RunConfig] = []
    for recipe in registry.recipes():
        name = recipe.name
        try:
            run = load_run(based_on_asked(asked, name, registry), asked.of_run, registry=registry)
            if asked.target is not None:  # as they stand, to tell which of them it is
                recipes.append(load_run(name, registry=registry))
            if run.engine != base.engine:
                continue
            if not (run.accuracy or asked.all) or not run.strategy.exchanges:
                continue
            candidate = _Candidate(name, _here(run, asked, base), run.strategy, recipe=run)
            candidate = _checked(candidate, placement, model)
            if idle := _without_ranks(candidate.strategy, placement):
                refused.append((name, f"no two ranks meet in {idle}: without that it is a simpler strategy"))
                continue
            found.append(candidate)
        except HocketError as error:
            refused.append((name, str(error)))
    if asked.target is not None:
        own = _own(asked, base, registry, recipes)
        if own is not None and not any(each.run.strategy == own.run.strategy for each in found):
            try:
                found.append(_checked(own, placement, model))
            except HocketError as error:
                refused.append((own.name, str(error)))
    return found, refused


def _own(
    asked: Asked, base: RunConfig, registry: Registry, recipes: Sequence[RunConfig]
) -> _Candidate | None:
    """Return the strategy of what the user names; None where that exchanges nothing.

    Raises:
        ConfigError: it is malformed.
    """
    assert asked.target is not None
    run = load_run(file_or_recipe(asked.target, registry), asked.overrides, registry=registry)
    if run.engine != base.engine:
        raise UserError(
            f"{asked.target}: engine {run.engine.name} is not compared here: `hocket plan` plans it"
        )
    if not run.strategy.exchanges and not run.strategy.phases:
        return None
    name = ", ".join([Path(asked.target).name, *map(_last_key, asked.of_strategy)])
    here = _here(run, asked, base)
    reached = [phase.step for phase in run.strategy.phases if run.steps is None or phase.step < run.steps]
    last = max(reached, default=0)
    strategy = run.strategy.at(last)
    start: list[tuple[float, Strategy]] = []
    if last and run.steps is not None:
        limits = [*dict.fromkeys((0, *reached))]
        start = [((end - begin) / run.steps, run.strategy.at(begin)) for begin, end in pairwise(limits)]
    return _Candidate(
        f"{name}, from step {last} on" if last else name,
        here,
        strategy,
        recipe=next((each for each in recipes if _is_measured(each, strategy, here)), None),
        base=next(
            (each for each in recipes if each.name in (run.recipe, run.name) and _is_kin(each, strategy)),
            None,
        ),
        start=tuple(start),
    )


def _is_measured(recipe: RunConfig, strategy: Strategy, run: RunConfig) -> bool:
    """Return whether a recipe's words are of this strategy; its accuracy, of such an optimizer."""
    from hocket.strategy.compose import compose

    exact = recipe.changes.startswith(_NOTHING)
    same = exact or recipe.optimizer.class_name == run.optimizer.class_name
    settings = (recipe.strategy, *(compose(recipe.strategy, each) for each in recipe.also_measured))
    return bool(recipe.accuracy) and same and strategy in settings


def _is_kin(recipe: RunConfig, strategy: Strategy) -> bool:
    """Return whether a strategy has a recipe's exchanges, whatever their settings."""
    parts = [
        [
            (each.slot, type(each.collective), type(each.compressor), type(each.outer))
            for each in one.exchanges
        ]
        for one in (recipe.strategy, strategy)
    ]
    return parts[0] == parts[1]


def _here(run: RunConfig, asked: Asked, base: RunConfig) -> RunConfig:
    if asked.optimizer is not None:
        run = replace(run, optimizer=base.optimizer)
    return replace(run, network=base.network)


def _checked(candidate: _Candidate, placement: Placement, model: nn.Module) -> _Candidate:
    """Return a candidate that is possible here, if need be with an override.

    Raises:
        HocketError: it is not; says why.
    """
    from hocket.cli.checking import check_run
    from hocket.plan.plan import plan
    from hocket.strategy.compose import compose

    run = candidate.run
    try:
        check_run(run)
    except AttachError as error:
        if not error.override or run.strategy.phases:
            raise
        strategy = compose(run.strategy, error.override)
        candidate = replace(
            candidate,
            name=f"{candidate.name}, {_last_key(error.override)}",
            run=replace(run, strategy=strategy),
            strategy=strategy,
            override=error.override,
            recipe=None,
            base=candidate.recipe or candidate.base,
        )
        check_run(candidate.run)
    plan(candidate.strategy, model, placement, run.network)
    return candidate


def _without_ranks(strategy: Strategy, placement: Placement) -> str:
    """Return the exchanges that do not take place among these ranks, such as those within hosts of one rank."""
    return ", ".join(
        each.name
        for each in strategy.exchanges
        if not any(each.takes_place(len(part)) for part in each.over.parts(placement))
    )


def _last_key(override: str) -> str:
    """Return an override without what leads to its last key."""
    path, _, value = override.partition("=")
    return f"{path.rpartition('.')[2]}={value}"


def _show_head(
    base: RunConfig, placement: Placement, planned: Plan, step_s: float, delays: Delays | None
) -> None:
    hosts = len(set(placement.hosts))
    speed = base.network.bandwidth_bits_per_s
    late = "" if delays is None else f"; late ranks: {title(delays)}"
    _say(
        [
            f"{placement.size} ranks on {hosts} host{'s' * (hosts > 1)}, {speed / 1e9:.3g} Gbit/s a host, latency "
            f"{format_seconds(base.network.latency_s)}; {planned.num_parameters:,} parameters, "
            f"{format_bytes(planned.model_bytes)}; a step computes {format_seconds(step_s)}{late}"
        ],
        bullet="",
    )
    print()


def _show(
    predictions: _Predictions,
    where: Placement,
    bandwidth: float,
    delays: Delays | None,
    *,
    packing: bool,
) -> list[_Candidate]:
    """Print the table, and return its rows' candidates in its order."""
    times = {name: predictions.as_tested(name, where, bandwidth) or 0.0 for name in predictions.candidates}
    shown = sorted(  # plain allreduce before what takes as long to three digits, as on hosts of one rank
        predictions.candidates.values(),
        key=lambda each: (not each.loses_nothing, float(f"{times[each.name]:.3g}"), each.name != PLAIN),
    )
    tests = _tests(shown)
    tested = any(each.has_start for each in shown)
    per_host = where.size // len(set(where.hosts))
    hosts = [number for number in _HOSTS if delays is None or _fits(delays, number * per_host)]
    headers = (
        "strategy",
        "step",
        *(("as tested",) * tested),
        "waiting",
        *(("held up",) * (delays is not None)),
        "sent per step",
        "memory",
        *(("compressing",) * packing),
        f"{PLAIN} is level from",
        "and up to",
        "costs",
    )
    rows = []
    for each in shown:
        found = predictions.of(each.name, where, bandwidth)
        assert found is not None
        rows.append(
            (
                each.name,
                format_seconds(found.step_s),
                *((format_seconds(times[each.name]) if each.has_start else "",) * tested),
                format_seconds(found.exposed_s),
                *((format_seconds(found.held_up_s),) * (delays is not None)),
                format_bytes(found.bytes_per_step),
                format_bytes(found.memory_bytes),
                *((format_seconds(found.packing_s),) * packing),
                *_level(predictions, each.name, where, bandwidth, hosts),
                _NOTHING if each.loses_nothing else tests.get(each.test, _UNKNOWN),
            )
        )
    show_table(headers, rows, numbers=headers[1:-1])
    print()
    return shown


def _level(
    predictions: _Predictions, name: str, where: Placement, bandwidth: float, hosts: Sequence[int]
) -> tuple[str, str]:
    """Return from which bandwidth on, and up to how many hosts, plain allreduce is level with a candidate."""
    from hocket.plan.utilisation import BANDWIDTHS

    if name == PLAIN:
        return "", ""
    per_host = where.size // len(set(where.hosts))
    least = least_bandwidth(lambda each: predictions.is_level(name, where, each))
    most = most_hosts(
        lambda number: predictions.is_level(name, Placement.of_counts([per_host] * number), bandwidth), hosts
    )
    lowest = "" if least is None else f"{least / 1e9:.3g} Gbit/s{' or less' * (least == BANDWIDTHS[0])}"
    reached = "" if most is None else f"{most} hosts{' or more' * (most == hosts[-1])}"
    return lowest or "never", reached or "never"


def _tests(shown: Sequence[_Candidate]) -> dict[str, str]:
    """Return letters for the tests by which accuracy was measured, in the order of the table."""
    tests = dict.fromkeys(each.test for each in shown if each.test and not each.loses_nothing)
    return {test: chr(ord("a") + place) for place, test in enumerate(tests)}


def _fits(delays: Delays, ranks: int) -> bool:
    try:
        delays.check_size(ranks)
    except ValueError:
        return False
    return True


def _show_costs(shown: Sequence[_Candidate]) -> None:
    print("What they change, and what that cost; figures of different tests cannot be compared.\n")
    groups = {
        f"{_NOTHING}: the mean of all gradients": [each for each in shown if each.loses_nothing],
        **{
            f"{letter}: {test}": [each for each in shown if each.test == test and not each.loses_nothing]
            for test, letter in _tests(shown).items()
        },
        f"{_UNKNOWN}": [each for each in shown if not (each.loses_nothing or each.test)],
    }
    for heading, members in groups.items():
        if members:
            _say([heading], bullet="")
            _say([_cost(each) for each in members], bullet="  - ")


def _cost(each: _Candidate) -> str:
    recipe = each.recipe
    if recipe is not None:
        measured = f"; measured: {recipe.accuracy}" if each.test and not each.loses_nothing else ""
        other = "" if each.name == recipe.name else f"as {recipe.name}: "
        return f"{each.name}: {other}{recipe.changes or 'see its paper'}{measured}"
    told = [f"set {each.override}"] if each.override else []
    if each.base is not None and each.base.changes:
        told.append(f"the recipe that it is based on: {each.base.changes}")
    if each.base is not None and each.base.measured_on:
        told.append(f"measured of that: {each.base.accuracy} ({each.base.measured_on})")
    return f"{each.name}: {'; '.join(told) or 'your own'}"


def _absent(installed: Sequence[str]) -> list[str]:
    """Return what packages with recipes are not installed, and what installs them."""
    absent = [f"hocket-{word}" for word in KNOWN_WORDS if word not in installed and word != TASKS]
    commands = "; ".join(how_to_install(package) for package in absent)
    return [f"Recipes of {', '.join(absent)} are not here: {commands}"] if absent else []


def _assumptions(
    asked: Asked, where: Placement, delays: Delays | None, shown: Sequence[_Candidate]
) -> list[str]:
    margin = f"{100 * (CLOSE - 1):.0f} %"
    average = ", as tested where that is given" if any(each.has_start for each in shown) else ""
    lines = [
        "Predicted, not measured: exchanges take what `hocket plan` says, one at a time; overlap backward hides, of "
        "all segments but the last, what two thirds of a step can, overlap forward a third, and a delay so many "
        "steps. A fast step is worth nothing by itself: compare what strategies reach in the same time (`hocket "
        "sweep`, `hocket compare`).",
        "Known error: against 4 hosts at 100 Mbit/s and 1 Gbit/s at most 1.3 times off, eager.solo 1.6; against 8, "
        "whose ranks shared two cores, eager.solo 2.0, sgp 1.7 and redsync 1.4 (docs/choosing.md).",
        f"Order: what changes nothing first, then by a step's time{average}.",
    ]
    if where.size > len(set(where.hosts)):
        lines.append(
            "Several ranks on a host share its link: a collective passes it once, gossip with each message that "
            f"leaves. Messages within a host take memory's {WITHIN_A_HOST.bandwidth_bits_per_s / 1e9:.0f} Gbit/s."
        )
    if any(each.synchronous_fraction for each in shown):
        fractions = {each.test: each.synchronous_fraction for each in shown if each.synchronous_fraction}
        told = ", ".join(
            f"{fractions[test]:.0%} in {of}" for test, of in _tests(shown).items() if test in fractions
        )
        lines.append(
            f"As tested: accuracy was measured in runs that begin with steps of {_SYNCHRONOUS}, {told}; this is a step "
            "of such a run on average. docs/choosing.md has the lines of a file that begins so."
        )
    for each in shown:
        if each.start:
            share = sum(fraction for fraction, _ in each.start)
            lines.append(f"As tested, {each.name}: a step on average, the {share:.0%} before it included.")
        elif each.strategy != each.run.strategy and each.run.strategy.phases and each.run.steps is None:
            lines.append(f"{each.name}: with steps=N its average over all phases is told, too.")
    lines += [
        f"{PLAIN} is level: plain allreduce takes at most {margin} longer (than as tested, where that is given), from "
        "this bandwidth of a host on, and up to so many such hosts with this network.",
        "Memory: of buffers for what is sent and what comes back, and of what compressors and outer optimizers keep. "
        "Parameters that are sent from where they lie need none.",
    ]
    if asked.params is not None:
        lines.append(f"The model is taken for {MATRICES} equal matrices: --model or task= says more.")
    if not asked.measure:
        lines.append(
            "Computing that compressors do is not counted: --measure takes its time on this machine."
        )
    if delays is not None:
        lines.append(
            "Held up: by ranks that are late, one's own delays included; ranks with partial collectives do not wait."
        )
    if not asked.all:
        lines.append("--all ranks recipes, too, whose accuracy has not been measured.")
    return lines


def _say(lines: Sequence[str], bullet: str = "- ") -> None:
    width = shutil.get_terminal_size((_TEXT_WIDTH, 0)).columns
    for line in lines:
        print(textwrap.fill(line, width, initial_indent=bullet, subsequent_indent=" " * len(bullet)))
