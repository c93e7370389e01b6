"""The types of plain data: states of checkpoints, trees of configurations, objects of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Tree", "TreeView"]

#: Values of any type by name.
Tree = dict[str, Any]

#: The same, to be read.
TreeView = Mapping[str, Any]
