"""Components that hocket-redsync provides, each imported when a config names it."""

from __future__ import annotations

from pathlib import Path

from hocket.api import Registrar, hookimpl

_RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the compressors, the collective and the recipes."""
    registry.compressor("hybrid", "hocket_redsync.hybrid:Hybrid")
    registry.compressor("exact", "hocket_redsync.hybrid:Exact")
    registry.compressor("trimmed", "hocket_redsync.hybrid:Trimmed")
    registry.compressor("threshold", "hocket_redsync.hybrid:Threshold")
    registry.compressor("sampled", "hocket_redsync.hybrid:Sampled")
    registry.compressor("asq", "hocket_redsync.asq:Asq")
    registry.collective("allreduce", "hocket_redsync.allreduce:RedSyncAllreduce")
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
