"""Components that hocket-adpsgd provides, each imported when a config names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hocket.api import hookimpl

if TYPE_CHECKING:
    from hocket.api import Registrar

_RECIPE = Path(__file__).parent / "recipes" / "adpsgd.yaml"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the collective and the recipe."""
    registry.collective("pair_average", "hocket_adpsgd.pair_average:PairAverage")
    registry.recipe(_RECIPE)
