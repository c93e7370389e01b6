"""Find installed plugins, check that they fit this core, and import the one that is asked for."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hocket.errors import MissingPluginError, suggest
from hocket.installing import how_to_install, installed_version
from hocket.patience import speaking_after
from hocket.plugin.markers import PROJECT

#: The plugins that Hocket itself offers; the package of `word` is `hocket-word`.
KNOWN_WORDS = (
    "adpsgd",
    "crossover",
    "diloco",
    "eager",
    "eapipe",
    "gossipgrad",
    "powersgd",
    "redsync",
    "tasks",
)

#: The plugin whose tasks have no prefix: a task that core lacks is looked up there.
TASKS = "tasks"

_CORE_PACKAGE = "hocket-core"
_log = logging.getLogger("hocket")

#: Seconds after which a message says that a plugin is still being imported.
LONG_S = 10.0

FindEntryPoints = Callable[[], Iterable[EntryPoint]]


@dataclass(frozen=True)
class Plugin:
    """The provider of components: a plugin's package, or core.

    Attributes:
        word: the entry point's name; empty for core.
        package: the distribution's name.
        version: the distribution's version, or empty if none is known.
    """

    word: str
    package: str
    version: str = ""

    @property
    def prefix(self) -> str:
        """The prefix of its components' names, such as `eager.`."""
        return "" if self.word in ("", TASKS) else f"{self.word}."

    def full_name(self, name: str) -> str:
        """Return the name in configs of what it registers as `name`: with the prefix, unless it is the word itself."""
        return name if name == self.word else self.prefix + name

    def __str__(self) -> str:
        return f"{self.package} {self.version}".rstrip()


CORE = Plugin("", _CORE_PACKAGE, installed_version(_CORE_PACKAGE) or "")


def installed() -> Iterable[EntryPoint]:
    """Return the entry points of all installed plugins, without importing any."""
    try:
        return importlib.metadata.entry_points(group=PROJECT)
    except Exception:  # some package's file is damaged, whosever it is
        return _readable()


def _readable() -> list[EntryPoint]:
    """Return the entry points of all packages whose files can be read, and warn of the others."""
    found: list[EntryPoint] = []
    for distribution in importlib.metadata.distributions():
        try:
            found += distribution.entry_points.select(group=PROJECT)
        except Exception as error:
            place = distribution.locate_file("")
            _log.warning(
                "a package in %s has an entry_points.txt that cannot be read (%s): `pip check` finds it",
                place,
                error,
            )
    return found


def import_plugin(word: str, find: FindEntryPoints) -> tuple[Plugin, Any]:
    """Import the plugin that is installed as `word`.

    Returns:
        Who it is, and the object (mostly a module) that carries its hooks.

    Raises:
        MissingPluginError: not installed, installed twice, made for another core, or it does not import.
    """
    entry_points = list(find())
    matching = [entry for entry in entry_points if entry.name == word]
    if not matching:
        raise MissingPluginError(_advice(word, [entry.name for entry in entry_points]))
    if len(matching) > 1:
        packages = " and ".join(str(_describe(entry)) for entry in matching)
        raise MissingPluginError(f"plugin {word!r} is provided by {packages}: uninstall one of them")
    [entry] = matching
    plugin = _describe(entry)
    _check_core(entry, plugin)
    if EntryPoint.pattern.match(entry.value) is None:
        raise MissingPluginError(
            f"plugin {plugin.word!r} of package {plugin} does not load: its entry point {entry.value!r} "
            "names no module"
        )
    try:
        with speaking_after(LONG_S, lambda: _tell_of_long_import(plugin)):
            return plugin, entry.load()
    except (Exception, SystemExit) as error:
        raise MissingPluginError(
            f"plugin {word!r} of package {plugin} does not load: {cause_of(error)}"
        ) from error


def _tell_of_long_import(plugin: Plugin) -> None:
    _log.warning(
        "plugin %r of package %s is still being imported after %g s: it may be waiting for something; Ctrl-C stops "
        "it",
        plugin.word,
        plugin,
        LONG_S,
    )


def cause_of(error: BaseException) -> str:
    """Return the text of an error in others' code, on one line."""
    if isinstance(error, SystemExit):
        return f"it ends the process, with sys.exit({'' if error.code is None else repr(error.code)})"
    return f"{type(error).__name__}: {error}"


def _describe(entry: EntryPoint) -> Plugin:
    """Return the provider of a plugin; without readable metadata, its module's name."""
    try:
        if entry.dist is not None:
            return Plugin(entry.name, entry.dist.name or entry.value, entry.dist.version or "")
    except Exception:
        pass  # `_check_core` says why
    return Plugin(entry.name, entry.value)


def _advice(word: str, words: list[str]) -> str:
    if word in KNOWN_WORDS:
        return f"plugin {word!r} is not installed: {how_to_install(f'hocket-{word}')}"
    have = ", ".join(sorted(words)) or "none"
    hint = suggest(word, {*words, *KNOWN_WORDS})
    return (
        f"no installed package registers a plugin {word!r} (installed: {have}). If it is your own, check "
        f"[project.entry-points.hocket] of its pyproject.toml, and pip install -e . again.{hint}"
    )


def _check_core(entry: EntryPoint, plugin: Plugin) -> None:
    """Compare the version of core that the plugin's package requires with the running core."""
    running = installed_version(_CORE_PACKAGE)
    if entry.dist is None or not running:
        return
    try:
        requirements = [*map(Requirement, entry.dist.requires or ())]
    except Exception as error:
        raise MissingPluginError(
            f"plugin {plugin.word!r} of package {plugin}: the package's metadata cannot be read "
            f"({' '.join(str(error).split())}): reinstall it, or uninstall it"
        ) from error
    for requirement in requirements:
        if canonicalize_name(requirement.name) != _CORE_PACKAGE:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(Version(running), prereleases=True):
            raise MissingPluginError(
                f"plugin {plugin.word!r} of package {plugin} needs {_CORE_PACKAGE}{requirement.specifier}, but this "
                f"is {_CORE_PACKAGE} {running}: install matching versions"
            )
