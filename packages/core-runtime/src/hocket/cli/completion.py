"""Names that the shell completes: recipes, and tasks behind `task=`; torch is not imported."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from hocket.plugin import Kind, Registry, default_registry

_TASK = "task="


def complete_recipes(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the recipes of all plugins that begin with `incomplete`, or let the shell look for files."""
    found = _beginning(incomplete, (recipe.name for recipe in _everything().recipes()))
    return found or [CompletionItem(incomplete, type="file")]


def complete_overrides(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the tasks that begin with the word behind `task=`."""
    words = tuple(context.params.get(parameter.name or "") or ())
    if incomplete.startswith(_TASK):
        return _beginning(incomplete, (_TASK + name for name in _everything().names(Kind.TASK)))
    # bash passes the parts before and behind an = as words of their own.
    if words[-2:] == ("task", "="):
        return _beginning(incomplete, _everything().names(Kind.TASK))
    return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _everything() -> Registry:
    """Return the registry with all plugins that load."""
    registry, log = default_registry(), logging.getLogger("hocket")
    level = log.level
    log.setLevel(logging.ERROR)  # a shell shows completions only, and no warnings
    try:
        registry.load_installed()
    finally:
        log.setLevel(level)
    return registry
