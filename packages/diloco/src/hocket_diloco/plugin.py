"""Recipes that hocket-diloco registers."""

from __future__ import annotations

from pathlib import Path

from hocket.api import Registrar, hookimpl

__all__ = ["hocket_register"]

_RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the recipes."""
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
