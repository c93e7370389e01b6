"""Components that hocket-eapipe provides, each imported when a config names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hocket.api import hookimpl

if TYPE_CHECKING:
    from hocket.api import Registrar

_RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the engine and its recipes."""
    registry.engine("pipeline", "hocket_eapipe.pipeline:Pipeline")
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
