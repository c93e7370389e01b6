"""Components that hocket-crossover registers."""

from __future__ import annotations

from pathlib import Path

from hocket.api import Registrar, hookimpl

_RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the topologies and the recipes."""
    registry.topology("fair_random", "hocket_crossover.fair_random:FairRandom")
    registry.topology("unfair", "hocket_crossover.unfair:Unfair")
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
