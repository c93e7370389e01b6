"""Components that hocket-diloco provides, each imported when a config names it, and recipes."""

from __future__ import annotations

from pathlib import Path

from hocket.api import Registrar, hookimpl

_RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the compressors, the outer optimizer and the recipes."""
    registry.outer("noloco", "hocket_diloco.noloco:NoLoCo")
    registry.compressor("quantise", "hocket_diloco.quantise:Quantise")
    registry.compressor("dct", "hocket_diloco.dct:Dct")
    registry.compressor("chunk_topk", "hocket_diloco.chunk_topk:ChunkTopK")
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
