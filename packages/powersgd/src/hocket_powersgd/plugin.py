"""Components that hocket-powersgd provides, each imported when a config names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hocket.api import hookimpl

if TYPE_CHECKING:
    from hocket.api import Registrar

_RECIPE = Path(__file__).parent / "recipes" / "powersgd.yaml"


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the compressor and the recipe."""
    registry.compressor("powersgd", "hocket_powersgd.compressor:PowerSGD")
    registry.recipe(_RECIPE)
