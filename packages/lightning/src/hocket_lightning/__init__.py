"""Hocket's strategies for Lightning: `HocketStrategy` for its Trainer; `hocket_lightning.fabric` has Fabric's."""

from __future__ import annotations

from typing import Any

__all__ = ["HocketStrategy"]


def __getattr__(name: str) -> Any:
    # Late, so that Fabric's strategy works where only lightning_fabric is installed.
    if name != "HocketStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hocket_lightning.trainer import HocketStrategy

    return HocketStrategy
