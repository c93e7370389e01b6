"""Tensor subclasses that hold other tensors, such as an 8-bit optimizer's state: taken apart as torch does it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hocket.errors import CheckpointError

__all__ = ["is_composite", "join_parts", "parts_of", "plain_tensors"]


def is_composite(value: object) -> bool:
    """Return whether a tensor is made of others, and has no values of its own."""
    return isinstance(value, Tensor) and type(value) is not Tensor and hasattr(value, "__tensor_flatten__")


def parts_of(value: Any) -> tuple[dict[str, Tensor], object]:
    """Return the tensors that it is made of, by name, and what else it is made of."""
    names, context = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}, context


def join_parts(
    module: str, name: str, parts: Mapping[str, Tensor], context: Any, shape: Any, stride: Any
) -> Tensor:
    """Put a tensor together that `parts_of` took apart.

    Args:
        module, name: of its class, in a module that has been imported.
        parts, context: what `parts_of` returned.
        shape, stride: the tensor's own.

    Raises:
        CheckpointError: there is no such class.
    """
    kind: Any = sys.modules.get(module)
    for each in name.split("."):
        kind = getattr(kind, each, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise CheckpointError(
            f"{module}.{name}, a kind of tensor that was saved, is not imported here: import {module} before the "
            "checkpoint is loaded"
        )
    joined: Tensor = kind.__tensor_unflatten__(dict(parts), context, shape, stride)
    return joined


def plain_tensors(value: Tensor) -> list[Tensor]:
    """Return the tensors that hold a tensor's values: itself, or, within one another, what it is made of."""
    if not is_composite(value):
        return [value]
    return [plain for part in parts_of(value)[0].values() for plain in plain_tensors(part)]
