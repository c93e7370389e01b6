"""The types of values that Hocket only passes on: plain data (states, configurations, JSON), and the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

#: A batch in a form of the user's own: as a loader yields it, its inputs, its target, or the model's output for it.
#: What a loader yields is (inputs, target), or a mapping that is both. A model is called with a mapping's values by
#: name, with those of a tuple or list one after the other, with anything else as it is.
Batch = Any

#: Values of any type by name.
Tree = dict[str, Any]

#: The same, to be read.
TreeView = Mapping[str, Any]


class Stateful(Protocol):
    """An object whose state a checkpoint holds: a scheduler, a scaler, a loader, or one of the user's."""

    def state_dict(self) -> object:
        """Return the state, of the types that `hocket.checkpoint.tree` lists."""

    def load_state_dict(self, state: Any, /) -> object:
        """Continue from a result of `state_dict`."""


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
