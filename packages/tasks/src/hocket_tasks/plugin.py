"""Tasks that hocket-tasks provides, each imported when a config names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.api import hookimpl

if TYPE_CHECKING:
    from hocket.api import Registrar


@hookimpl
def hocket_register(registry: Registrar) -> None:
    """Register the tasks; unlike other plugins' components they are named without a prefix."""
    registry.task("bible", "hocket_tasks.bible:Bible")
    registry.task("fashion_mnist", "hocket_tasks.fashion_mnist:FashionMNIST")
    registry.task("hyperplane", "hocket_tasks.hyperplane:Hyperplane")
    registry.task("videos", "hocket_tasks.videos:Videos")
