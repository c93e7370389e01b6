"""Components that hocket-eager provides, each imported when a config names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hocket.api import hookimpl

if TYPE_CHECKING:
    from hocket.api import Registrar

_RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the collective, the benchmark and the recipes."""
    registry.collective("partial_allreduce", "hocket_eager.collective:PartialAllreduce")
    registry.benchmark(
        "partial_allreduce",
        "hocket_eager.benchmark.partial_allreduce",
        "latency of partial allreduces against MPI's, when ranks arrive one after the other",
    )
    for recipe in sorted(_RECIPES.glob("*.yaml")):
        registry.recipe(recipe)
