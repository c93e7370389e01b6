"""The registrar, which a plugin's hook receives to provide components, recipes and benchmarks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from hocket.errors import ConfigError
from hocket.plugin.discovery import Plugin
from hocket.plugin.kinds import Kind, check_component

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_NAME_RULE = "a name has lower-case letters, digits and underscores, and no prefix"


@dataclass(frozen=True)
class Registration:
    """A component as it was registered.

    Attributes:
        name: as a config writes it, with the plugin's prefix.
        component: the class, or where to import it from, as `module:Class`.
    """

    kind: Kind
    name: str
    component: type | str
    plugin: Plugin


@dataclass(frozen=True)
class RecipeFile:
    """A recipe as it was registered: its name with the plugin's prefix, and its YAML file."""

    name: str
    path: Path
    plugin: Plugin


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark: its name with the plugin's prefix, a module to run, and a description."""

    name: str
    module: str
    description: str
    plugin: Plugin


@dataclass
class Tables:
    """The tables of all registered components, recipes and benchmarks."""

    components: dict[tuple[Kind, str], Registration] = field(default_factory=dict)
    recipes: dict[str, RecipeFile] = field(default_factory=dict)
    benchmarks: dict[str, Benchmark] = field(default_factory=dict)

    def forget(self, plugin: Plugin) -> None:
        """Remove everything that `plugin` registered."""
        self.components = {key: c for key, c in self.components.items() if c.plugin != plugin}
        self.recipes = {name: r for name, r in self.recipes.items() if r.plugin != plugin}
        self.benchmarks = {name: b for name, b in self.benchmarks.items() if b.plugin != plugin}


class Registrar:
    """The registrar of one plugin's components, recipes and benchmarks, under the plugin's word.

    Names get the plugin's word as a prefix, but for the word itself: plugin `mine` has a topology `mine.ring`, and a
    recipe and a compressor `mine`.

    A component is registered as a class, or as `"module:Class"` to be imported only when a config names it.
    It is a frozen dataclass that implements its kind's interface. Every method raises ConfigError, naming the
    component, for a name that is taken or malformed and for a class that is not such a dataclass.
    """

    def __init__(self, plugin: Plugin, tables: Tables) -> None:
        self._plugin = plugin
        self._tables = tables

    def topology(self, name: str, component: type | str) -> None:
        """Provide a topology: who hears from whom, in each round."""
        self._add(Kind.TOPOLOGY, name, component)

    def collective(self, name: str, component: type | str) -> None:
        """Provide a collective: how contributions are combined."""
        self._add(Kind.COLLECTIVE, name, component)

    def compressor(self, name: str, component: type | str) -> None:
        """Provide a compressor: the form in which values travel."""
        self._add(Kind.COMPRESSOR, name, component)

    def scope(self, name: str, component: type | str) -> None:
        """Provide a scope: among which ranks an exchange takes place."""
        self._add(Kind.SCOPE, name, component)

    def segmentation(self, name: str, component: type | str) -> None:
        """Provide a segmentation: the pieces in which a model is exchanged."""
        self._add(Kind.SEGMENTATION, name, component)

    def outer(self, name: str, component: type | str) -> None:
        """Provide an outer optimizer: how outer parameters step by the ranks' mean distance from them."""
        self._add(Kind.OUTER, name, component)

    def merge(self, name: str, component: type | str) -> None:
        """Provide a merge: the way results enter the parameters."""
        self._add(Kind.MERGE, name, component)

    def samples(self, name: str, component: type | str) -> None:
        """Provide a sample exchange: how training samples move between ranks."""
        self._add(Kind.SAMPLES, name, component)

    def engine(self, name: str, component: type | str) -> None:
        """Provide an engine: how a batch flows through the model."""
        self._add(Kind.ENGINE, name, component)

    def task(self, name: str, component: type | str) -> None:
        """Provide a task: data, model and loss."""
        self._add(Kind.TASK, name, component)

    def delays(self, name: str, component: type | str) -> None:
        """Provide delays: which rank of a run is held up in which step, for how long."""
        self._add(Kind.DELAYS, name, component)

    def logger(self, name: str, component: type | str) -> None:
        """Provide a logger: a destination of a run's rows of metrics."""
        self._add(Kind.LOGGER, name, component)

    def recipe(self, path: str | PathLike[str]) -> None:
        """Provide a recipe: a YAML file named by its stem."""
        path = Path(path)
        name = self._plugin.full_name(path.stem)
        taken = self._tables.recipes.get(name)
        if taken is not None:
            raise ConfigError(
                f"recipe {name!r} is registered twice: by {taken.plugin} and by {self._plugin}. Rename one of them"
            )
        if not path.is_file():
            raise ConfigError(f"recipe {name!r} of {self._plugin}: there is no file {path}")
        self._tables.recipes[name] = RecipeFile(name, path, self._plugin)

    def benchmark(self, name: str, module: str, description: str) -> None:
        """Provide a benchmark: a module that `hocket bench NAME` runs as a program, and a line on what it compares."""
        full_name = self._plugin.full_name(name)
        what = f"benchmark {full_name!r} of {self._plugin}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{what}: {_NAME_RULE}")
        if full_name in self._tables.benchmarks:
            raise ConfigError(f"{what} is registered twice")
        self._tables.benchmarks[full_name] = Benchmark(full_name, module, description, self._plugin)

    def _add(self, kind: Kind, name: str, component: type | str) -> None:
        full_name = self._plugin.full_name(name)
        what = f"{kind} {full_name!r} of {self._plugin}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{what}: {_NAME_RULE}")
        taken = self._tables.components.get((kind, full_name))
        if taken is not None:
            raise ConfigError(
                f"{kind} {full_name!r} is registered twice: {_path(taken.component)} by {taken.plugin} and "
                f"{_path(component)} by {self._plugin}. Rename one of them"
            )
        if not isinstance(component, str):
            try:
                check_component(kind, component)
            except ValueError as error:
                raise ConfigError(f"{what}: {_path(component)} {error}") from error
        self._tables.components[kind, full_name] = Registration(kind, full_name, component, self._plugin)


def _path(component: object) -> str:
    if isinstance(component, type):
        return f"{component.__module__}.{component.__qualname__}"
    return str(component)
