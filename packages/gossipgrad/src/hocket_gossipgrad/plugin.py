"""Components that hocket-gossipgrad provides, each imported when a config names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hocket.api import hookimpl

if TYPE_CHECKING:
    from hocket.api import Registrar

_RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register topologies, the exchange of samples and recipes."""
    registry.topology("dissemination", "hocket_gossipgrad.dissemination:Dissemination")
    registry.topology("hypercube", "hocket_gossipgrad.hypercube:Hypercube")
    registry.topology("rotated", "hocket_gossipgrad.rotated:Rotated")
    registry.topology("random_push", "hocket_gossipgrad.random_push:RandomPush")
    registry.samples("ring_shuffle", "hocket_gossipgrad.ring_shuffle:RingShuffle")
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
