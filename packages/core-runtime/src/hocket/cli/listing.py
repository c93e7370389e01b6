"""`hocket plugins`: the installed plugins, and the names that each registers."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator

import yaml

from hocket.errors import MissingPluginError
from hocket.installing import how_to_install
from hocket.plugin import CORE, KNOWN_WORDS, Kind, Plugin, RecipeFile, Registry, default_registry

# The gap before a column of a line.
_GAP = re.compile(r"\S {2,}|^ {2,}")


def plugins_command() -> None:
    """Carry out `hocket plugins`."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in describe_plugins(default_registry()):
        # Behind the names, or else behind the title.
        start = max((match.end() for match in _GAP.finditer(line)), default=0)
        print(textwrap.fill(line, width, subsequent_indent=" " * start) if width and line else line)


def describe_plugins(registry: Registry) -> Iterator[str]:
    """Yield lines on core and every installed plugin, which this loads, or the reason why one does not load."""
    yield from _describe(CORE, registry)
    for word in registry.installed():
        try:
            plugin = registry.load(word)
        except MissingPluginError as error:
            yield ""
            yield f"{word}: {error}"
            continue
        yield ""
        yield from _describe(plugin, registry)
    absent = [f"hocket-{word}" for word in KNOWN_WORDS if word not in registry.installed()]
    if absent:
        yield ""
        yield f"Not installed: {', '.join(absent)}. To install the first: {how_to_install(absent[0])}"


def _describe(plugin: Plugin, registry: Registry) -> Iterator[str]:
    yield f"{plugin}" if plugin == CORE else f"{plugin} ({plugin.word})"
    mine = [registration for registration in registry.components() if registration.plugin == plugin]
    for kind in Kind:
        names = [registration.name for registration in mine if registration.kind == kind]
        if names:
            yield f"  {kind.value:<13} {', '.join(names)}"
    benchmarks = [b.name for b in registry.benchmarks() if b.plugin == plugin]
    if benchmarks:
        yield f"  {'benchmark':<13} {', '.join(benchmarks)}"
    recipes = [recipe for recipe in registry.recipes() if recipe.plugin == plugin]
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for position, recipe in enumerate(recipes):
        title = "" if position else "recipes"
        yield f"  {title:<13} {recipe.name:<{width}}  {_description(recipe)}".rstrip()


def _description(recipe: RecipeFile) -> str:
    try:
        content = yaml.safe_load(recipe.path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return f"(cannot be read: {str(error).splitlines()[0]})"
    return str(content.get("description", "")) if isinstance(content, dict) else "(no mapping)"
