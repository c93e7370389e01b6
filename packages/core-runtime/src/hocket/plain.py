"""Plain data: states of checkpoints, trees of configurations, objects of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Tree", "TreeView", "flattened"]

#: Values of any type by name.
Tree = dict[str, Any]

#: The same, to be read.
TreeView = Mapping[str, Any]


def flattened(value: object, prefix: str = "") -> dict[str, object]:
    """Return the values in nested mappings and lists, by their keys joined by dots."""
    if isinstance(value, list):
        value = {str(index): child for index, child in enumerate(value)}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, object] = {}
    for key, child in value.items():
        flat.update(flattened(child, f"{prefix}.{key}" if prefix else key))
    return flat
