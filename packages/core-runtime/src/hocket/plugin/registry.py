"""The registry: every component and recipe by name, its plugin loaded when a config first names it."""

from __future__ import annotations

import logging
import threading
from functools import cache

import pluggy

from hocket.errors import ConfigError, MissingPluginError, did_you_mean, near_words
from hocket.installing import how_to_install
from hocket.plugin import core, hookspecs
from hocket.plugin.discovery import (
    CORE,
    KNOWN_WORDS,
    TASKS,
    FindEntryPoints,
    Plugin,
    cause_of,
    import_plugin,
    installed,
)
from hocket.plugin.kinds import Kind, check_component, import_object
from hocket.plugin.markers import PROJECT
from hocket.plugin.registrar import Benchmark, RecipeFile, Registrar, Registration, Tables

_log = logging.getLogger("hocket")


class Registry(Registrar):
    """Components and recipes by name, core's from the start and a plugin's when it is first asked for.

    Its own registering methods register under no prefix, as core does. Resolving is safe from several
    threads.
    """

    def __init__(self, find_entry_points: FindEntryPoints = installed) -> None:
        """Register core's components.

        Args:
            find_entry_points: returns the entry points of the installed plugins; the environment's by
                default.
        """
        super().__init__(CORE, Tables())
        self._find = cache(find_entry_points)  # by files of all installed packages
        self._loaded: dict[str, Plugin] = {}
        self._failed: set[str] = set()
        self._lock = threading.RLock()
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.add_plugin(CORE, core)

    def resolve(self, kind: Kind | str, name: str) -> type:
        """Return the class that a config means by `name`, after loading the plugin that it begins with.

        A task that core lacks is looked up in hocket-tasks, whose tasks have no prefix. A name of the form
        `module:Class` is imported as it stands: a component without a plugin.

        Raises:
            MissingPluginError: the plugin is not installed, does not load or does not fit this core.
            ConfigError: no such component; says which there are, and whether the name is of another kind.
        """
        kind = Kind(kind)
        if ":" in name:
            return _import_component(kind, name, repr(name))
        word, dot, _ = name.partition(".")
        is_new = (kind, name) not in self._tables.components
        is_plugins = word in {*self.installed(), *KNOWN_WORDS}
        if kind is Kind.TASK:  # a name with a dot may be a module's
            if dot and is_plugins:
                self.load(word)
            elif is_new and TASKS in self.installed():
                self.load(TASKS)
        elif dot or (is_new and is_plugins):
            self.load(word)
        registration = self._tables.components.get((kind, name))
        if registration is None:
            raise self._unknown(kind, name)
        if isinstance(registration.component, str):
            return _import_component(kind, registration.component, f"{name!r} of {registration.plugin}")
        return registration.component

    def name_of(self, kind: Kind | str, component: type) -> str:
        """Return the name by which a config means `component`: the registered one, else `module:Class`."""
        path = f"{component.__module__}:{component.__qualname__}"
        names = (
            registration.name
            for registration in self._tables.components.values()
            if registration.kind == Kind(kind) and registration.component in (component, path)
        )
        return next(names, path)

    def names(self, kind: Kind | str) -> list[str]:
        """Return the names of all components of one kind that are registered so far, sorted."""
        return [name for of_kind, name in sorted(self._tables.components) if of_kind == Kind(kind)]

    def recipe_file(self, name: str) -> RecipeFile:
        """Return the recipe called `name`, after loading its plugin.

        Raises:
            MissingPluginError: the plugin is not installed, does not load or does not fit this core.
            ConfigError: no such recipe; says which there are.
        """
        word = name.partition(".")[0]
        if name not in self._tables.recipes and word in {*self.installed(), *KNOWN_WORDS}:
            self.load(word)
        found = self._tables.recipes.get(name)
        if found is not None:
            return found
        # A plugin's main recipe has the plugin's word.
        known = sorted({*self._tables.recipes, *self.installed()} - {TASKS})
        raise ConfigError(
            f"there is no recipe {name!r}.{self._near_recipes(name)} There are: {', '.join(known)}."
        )

    def _near_recipes(self, name: str) -> str:
        """Return which recipes of all plugins may be meant."""
        self.load_installed()
        return did_you_mean(_near(name, sorted(self._tables.recipes)))

    def components(self) -> tuple[Registration, ...]:
        """Return everything registered so far, by kind and name."""
        return tuple(self._tables.components[key] for key in sorted(self._tables.components))

    def recipes(self) -> tuple[RecipeFile, ...]:
        """Return the recipes registered so far, by name."""
        return tuple(self._tables.recipes[name] for name in sorted(self._tables.recipes))

    def benchmarks(self) -> tuple[Benchmark, ...]:
        """Return the benchmarks registered so far, by name."""
        return tuple(self._tables.benchmarks[name] for name in sorted(self._tables.benchmarks))

    def installed(self) -> tuple[str, ...]:
        """Return the words of all installed plugins, loaded or not."""
        return tuple(sorted({entry.name for entry in self._find()}))

    def loaded(self) -> tuple[Plugin, ...]:
        """Return the plugins loaded so far, core first."""
        return tuple(self._loaded.values())

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks of everything loaded, for instance `hook.hocket_step_end(session=session, step=step)`."""
        return self._manager.hook

    def observe(self, observer: object) -> None:
        """Add an object with a `hocket_step_end` of its own, marked with `hookimpl`."""
        self._manager.register(observer)

    def load_installed(self) -> None:
        """Load all installed plugins; warn once of those that do not load."""
        for word in self.installed():
            try:
                self.load(word)
            except MissingPluginError as error:
                if word not in self._failed:
                    _log.warning("%s", error)
                self._failed.add(word)

    def load(self, word: str) -> Plugin:
        """Import the plugin installed as `word` and let it register, unless it has done so.

        Raises:
            MissingPluginError: the plugin is not installed, does not load or does not fit this core.
        """
        with self._lock:
            if word not in self._loaded:
                plugin, hooks = import_plugin(word, self._find)
                self.add_plugin(plugin, hooks)
            return self._loaded[word]

    def add_plugin(self, plugin: Plugin, hooks: object) -> None:
        """Let a module or an object with a `hocket_register` register as `plugin`: all of it or nothing.

        Raises:
            MissingPluginError: it has no such hook, or the hook failed; names plugin, package and cause.
        """
        with self._lock:
            try:
                self._manager.register(hooks, name=plugin.word or plugin.package)
                others = [other for other in self._manager.get_plugins() if other is not hooks]
                register = self._manager.subset_hook_caller("hocket_register", remove_plugins=others)
                if not register.get_hookimpls():
                    raise ConfigError("it has no function hocket_register marked with hocket.plugin.hookimpl")
                register(registry=Registrar(plugin, self._tables))
            except (Exception, SystemExit) as error:
                if self._manager.is_registered(hooks):
                    self._manager.unregister(hooks)
                self._tables.forget(plugin)
                cause = str(error) if isinstance(error, ConfigError) else cause_of(error)
                raise MissingPluginError(
                    f"plugin {plugin.word!r} of package {plugin} does not register: {cause}"
                ) from error
            self._loaded[plugin.word] = plugin

    def _unknown(self, kind: Kind, name: str) -> ConfigError:
        self.load_installed()
        allowed = self.names(kind)
        others = [other for other in Kind if (other, name) in self._tables.components]
        problem = f"{name!r} is a {others[0]}, not a {kind}" if others else f"there is no {kind} {name!r}"
        message = (
            f"{problem}.{did_you_mean(_near(name, allowed)[:1])} There are: {', '.join(allowed) or 'none'}."
        )
        plugin = self._loaded.get(name.partition(".")[0])
        mine = any(each.plugin == plugin and each.kind is kind for each in self._tables.components.values())
        if plugin is not None and plugin.prefix and not mine:
            message += f" Plugin {plugin.word!r} of {plugin} registers no {kind}: "
            message += f"registry.{kind}(...) in its hocket_register does"
        if kind is not Kind.TASK:
            return ConfigError(message)
        message += f" One of your own is module:attribute, such as {name.removesuffix('.py')}:MyTask"
        if TASKS in self.installed():
            return ConfigError(message)
        package = f"hocket-{TASKS}"
        return MissingPluginError(
            f"{message}. {package} has more, but is not installed: {how_to_install(package)}"
        )


def _near(name: str, names: list[str]) -> list[str]:
    """Return which of all plugins' names may be meant: those that lack only their prefix, else near ones."""
    return [full for full in names if full.rpartition(".")[2] == name] or near_words(name, names)


@cache
def default_registry() -> Registry:
    """Return the process's registry, over the plugins of the environment."""
    return Registry()


def _import_component(kind: Kind, path: str, described: str) -> type:
    """Import and check a component given as `module:Class`; `described` names it in errors."""
    try:
        component = import_object(path)
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{kind} {described}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the module raises
        raise MissingPluginError(f"{kind} {described} does not import: {cause_of(error)}") from error
    try:
        check_component(kind, component)
    except ValueError as error:
        raise ConfigError(f"{kind} {described} {error}") from error
    checked: type = component
    return checked
