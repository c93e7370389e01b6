"""A run's file: read, checked, and given back complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hocket.config import scheduler
from hocket.config.component import build_reference, construct, describe, read_fields
from hocket.config.document import Document, Path
from hocket.config.optimizer import complete_arguments
from hocket.config.reference import Reference
from hocket.config.settings import ROOT_KEYS, RunSettings
from hocket.config.source import SLOTS, Target, load_document
from hocket.errors import CompositionError, ConfigError, HocketError, some
from hocket.plain import Tree, TreeView
from hocket.plugin import Kind, Registry, default_registry
from hocket.session.engine import DataParallel
from hocket.strategy.compose import build_strategy
from hocket.strategy.scope import Placement
from hocket.strategy.strategy import Strategy

if TYPE_CHECKING:
    from hocket.session.engine import Engine
    from hocket.task.api import Task

T = TypeVar("T")


@dataclass(frozen=True)
class RunConfig(RunSettings):
    """A run's file, checked.

    Task, optimizer, schedulers and engine are references, since building them needs torch: see `build_task`,
    `build_engine` and `hocket.config.optimizer.build_optimizer`.
    """

    strategy: Strategy = field(default_factory=Strategy)

    def check_size(self, ranks: int) -> None:
        """Refuse a number of ranks for which the engine, the strategy or the delays are not defined.

        Raises:
            CompositionError: names the exchange, the engine or the delays, and the possible sizes.
        """
        engine = build_engine(self)
        try:
            engine.check_size(ranks)
        except ValueError as error:
            raise CompositionError(
                f"engine {self.engine.name} does not fit {ranks} ranks: {error}"
            ) from error
        self._check_island(engine, ranks)
        self.strategy.check_size(Placement.on_one_host(self.replicas(ranks)))
        if self.delays is not None:
            try:
                self.delays.check_size(ranks)
            except ValueError as error:
                raise CompositionError(f"delays do not fit {ranks} ranks: {error}") from error

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas of the model on so many ranks, among which the strategy exchanges."""
        return build_engine(self).data_size(ranks) // self.island.ranks

    def shares(self, ranks: int) -> int:
        """Return the number of shares of the samples, each read by a rank, a pipeline or a tensor-parallel group."""
        return build_engine(self).data_size(ranks) // self.island.tensor

    def _check_island(self, engine: Engine, ranks: int) -> None:
        """Refuse islands that the engine cannot carry, or that ranks do not fill.

        Raises:
            CompositionError: says which it is.
        """
        size = self.island.ranks
        if size > 1 and not isinstance(engine, DataParallel):
            raise CompositionError(
                f"engine {self.engine.name} needs whole models, but an island of {size} ranks shares one: leave "
                "island or engine out"
            )
        if ranks % size:
            raise CompositionError(
                f"{ranks} ranks cannot be divided into islands of {size}: start {size * max(2, ranks // size)} ranks "
                f"(-n), or another multiple of {size}, or change island.shard"
            )


def load_run(target: Target, overrides: Sequence[str] = (), *, registry: Registry | None = None) -> RunConfig:
    """Read the configuration of a run: defaults, then the recipe, then the file, then the overrides.

    Args:
        target: a recipe's name, the path of a YAML file (it exists, or ends with .yaml or .yml), or a
            mapping.
        overrides: `KEY=VALUE` with keys from the run's root; those of slots may leave out `strategy`.
        registry: the registry of components; by default that of the installed plugins.

    Raises:
        ConfigError, CompositionError, MissingPluginError: as in `hocket.strategy.compose`.
    """
    registry = registry or default_registry()
    document = load_document(target, overrides, registry)
    try:
        return _built(document, registry)
    except ConfigError as error:
        elsewhere = _elsewhere(error.unknown, document, registry) if error.unknown else ""
        if not elsewhere:
            raise
        where = document.root
        for key in error.unknown:
            where = where.child(key)
        raise where.error(f"unknown key here; {elsewhere}") from error


def _built(document: Document, registry: Registry) -> RunConfig:
    root = document.root
    root.check_keys((*ROOT_KEYS, *SLOTS))
    settings = {key: value for key, value in document.tree.items() if key != "strategy"}
    values = read_fields(RunSettings, dataclasses.replace(root, value=settings), registry)
    strategy = build_strategy(document, registry, values.get("name"))
    return construct(RunConfig, root, {**values, "strategy": strategy})


def _elsewhere(path: Path, document: Document, registry: Registry) -> str:
    """Return the places at which an unknown key exists: full paths of this run, or else components."""
    other = document.copy()
    other.remove(path)
    try:
        places = list(_paths(resolved(_built(other, registry), registry), path[-1]))
    except HocketError:  # something else is wrong, too
        return ""
    if places:
        return f"write {' or '.join(places)}"
    if len(path) > 1:
        return ""
    registry.load_installed()
    holders = [
        f"{each.kind} {each.name}"
        for each in registry.components()
        if path[-1] in [field.name for field in dataclasses.fields(registry.resolve(each.kind, each.name))]
    ]
    return f"it is a key of {some(holders)}, of which this run has none" if holders else ""


def _paths(tree: object, key: object, path: str = "") -> Iterator[str]:
    """Yield the paths of a plain tree that end in a key, but for its root."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        if name == key and path:
            yield f"{path}{name}"
        yield from _paths(value, key, f"{path}{name}.")


def build_task(run: RunConfig, registry: Registry | None = None) -> Task:
    """Build the task of a run: a registered one, or the user's own, named `module:attribute`.

    Raises:
        ConfigError: no such task, or a field that it cannot have; names source and key.
    """
    reference = run.task
    if ":" not in reference.name:
        task: Task = build_reference(Kind.TASK, reference, registry or default_registry())
        return task
    from hocket.task.user import load_user_task

    return _of_user(load_user_task, reference)


def _of_user(ask: Callable[[str, TreeView], T], task: Reference) -> T:
    """Call something of a user's task; an error in it names its source."""
    try:
        return ask(task.name, task.arguments)
    except ConfigError as error:
        raise type(error)(f"{task.where.source}: {error}") from error


def build_engine(run: RunConfig, registry: Registry | None = None) -> Engine:
    """Build the engine of a run.

    Raises:
        ConfigError: no such engine, a field that it cannot have, or a setting that it cannot keep; names source and
            key.
    """
    engine: Engine = build_reference(Kind.ENGINE, run.engine, registry or default_registry())
    if run.clip_grad_norm is not None and engine.clips is not None:
        raise ConfigError(
            f"clip_grad_norm does not work with engine {run.engine.name}, which steps parts of the model itself: use "
            f"{engine.clips}"
        )
    return engine


def resolved(run: RunConfig, registry: Registry | None = None) -> Tree:
    """Return a run as plain, complete configuration, for `config.yaml` and to compare ranks; imports torch.

    `load_run` of it gives the same run, even if the recipe that it was based on changes.
    """
    settings = [setting.name for setting in dataclasses.fields(RunSettings)]
    plain = {name: describe(getattr(run, name), registry) for name in settings}
    plain["recipe"] = None
    plain["optimizer"] = {"name": run.optimizer.class_name, **complete_arguments(run.optimizer)}
    plain["schedulers"] = [
        {"name": each.class_name, **scheduler.complete_arguments(each)} for each in run.schedulers
    ]
    plain["engine"] = describe(build_engine(run, registry), registry)
    if ":" in run.task.name:
        from hocket.task.user import complete_fields

        plain["task"] = {"name": run.task.name, **_of_user(complete_fields, run.task)}
    else:
        plain["task"] = describe(build_task(run, registry), registry)
    plain["strategy"] = run.strategy.resolved(registry)
    plain["phases"] = plain["strategy"].pop("phases")
    plain["synchronous_steps"] = 0  # they are among the phases
    del plain["strategy"]["name"]
    return plain
