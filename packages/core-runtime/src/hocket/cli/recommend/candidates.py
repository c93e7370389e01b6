"""The strategies that `hocket recommend` compares: recipes, and what the user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.cli.recommend.options import Asked
from hocket.cli.recommend.situation import based_on_asked, file_or_recipe
from hocket.errors import AttachError, HocketError, UserError
from hocket.plugin import Registry
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, load_run

if TYPE_CHECKING:
    from torch import nn

    from hocket.strategy.strategy import Strategy

__all__ = ["NOTHING", "CandidateStrategy", "find_candidates"]

#: The beginning of a recipe's `changes` if it changes nothing in the mathematics.
NOTHING = "nothing"


@dataclass(frozen=True)
class CandidateStrategy:
    """A strategy to compare.

    Attributes:
        name: the recipe's name with its changed settings, or the file's name.
        run: the run with all overrides and options.
        strategy: the strategy of the last phase that the run reaches.
        recipe: the recipe whose description and test hold for this strategy; None if it was never measured.
        base: the recipe that it changes, if `recipe` is None.
        override: the setting that it needs to work here; empty for none.
        start: the strategies of earlier phases, each with its share of the run's steps; empty if the file has none.
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
        """True if a step is known to give the mean of all gradients."""
        return self.recipe is not None and self.recipe.changes.startswith(NOTHING)

    @property
    def test(self) -> str:
        """The test that measured its accuracy; empty if there is none."""
        return self.recipe.measured_on if self.recipe is not None else ""

    @property
    def synchronous_fraction(self) -> float:
        """The share of that test's steps that were a plain allreduce's, 0 to 1."""
        return self.recipe.synchronous_fraction if self.recipe is not None else 0.0

    @property
    def has_start(self) -> bool:
        """True if its run, or the run of the test, begins with another strategy."""
        return bool(self.start or self.synchronous_fraction)

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The candidate's strategy and those of its start, by name."""
        start = {self.of_start(place): each for place, (_, each) in enumerate(self.start)}
        return {self.name: self.strategy, **start}

    def of_start(self, place: int) -> str:
        """Return the name of the strategy at a place of its start."""
        return f"{self.name}: start {place}"


def find_candidates(
    asked: Asked, base: RunConfig, registry: Registry, placement: Placement, model: nn.Module
) -> tuple[list[CandidateStrategy], list[tuple[str, str]]]:
    """Return the strategies to compare, and the names of those left out with the reasons."""
    found: list[CandidateStrategy] = []
    refused = []
    registry.load_installed()
    recipes: list[RunConfig] = []
    for recipe in registry.recipes():
        name = recipe.name
        try:
            run = load_run(based_on_asked(asked, name, registry), asked.of_run, registry=registry)
            if asked.target is not None:  # without overrides, to find the one that the target is
                recipes.append(load_run(name, registry=registry))
            if run.engine != base.engine:
                continue
            if not (run.accuracy or asked.all) or not run.strategy.exchanges:
                continue
            candidate = CandidateStrategy(name, _here(run, asked, base), run.strategy, recipe=run)
            candidate = _checked(candidate, placement, model)
            if idle := _without_ranks(candidate.strategy, placement):
                refused.append(
                    (name, f"no two ranks take part in {idle}, without which it is a simpler strategy")
                )
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
) -> CandidateStrategy | None:
    """Return the strategy of the user's target, or None if it exchanges nothing.

    Raises:
        ConfigError: the target is malformed.
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
    return CandidateStrategy(
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
    """Return whether a recipe's description and accuracy hold for this strategy and optimizer."""
    from hocket.strategy.compose import compose

    exact = recipe.changes.startswith(NOTHING)
    same = exact or recipe.optimizer.class_name == run.optimizer.class_name
    settings = (recipe.strategy, *(compose(recipe.strategy, each) for each in recipe.also_measured))
    return bool(recipe.accuracy) and same and strategy in settings


def _is_kin(recipe: RunConfig, strategy: Strategy) -> bool:
    """Return whether a strategy has a recipe's exchanges, with any settings."""
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


def _checked(candidate: CandidateStrategy, placement: Placement, model: nn.Module) -> CandidateStrategy:
    """Return a candidate that works here, if need be with an override.

    Raises:
        HocketError: the candidate does not work here; gives the reason.
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
    """Return the exchanges that have no two ranks here, such as those within hosts of one rank."""
    return ", ".join(
        each.name
        for each in strategy.exchanges
        if not any(each.takes_place(len(part)) for part in each.over.parts(placement))
    )


def _last_key(override: str) -> str:
    """Return an override without the path to its last key."""
    path, _, value = override.partition("=")
    return f"{path.rpartition('.')[2]}={value}"
