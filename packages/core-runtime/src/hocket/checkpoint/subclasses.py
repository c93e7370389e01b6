"""Tensor subclasses that hold other tensors, such as an 8-bit optimizer's state: taken apart as torch does it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hocket.errors import CheckpointError


def is_composite(value: object) -> bool:
    """Return whether a tensor consists of other tensors, without values of its own."""
    return isinstance(value, Tensor) and type(value) is not Tensor and hasattr(value, "__tensor_flatten__")


def parts_of(value: Any) -> tuple[dict[str, Tensor], object]:
    """Return the tensors of which a composite tensor consists, by name, and its further context."""
    names, context = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}, context


def join_parts(
    module: str, name: str, parts: Mapping[str, Tensor], context: object, shape: object, stride: object
) -> Tensor:
    """Put a tensor together that `parts_of` took apart.

    Args:
        module, name: its class, in a module that has been imported.
        parts, context: the results of `parts_of`.
        shape, stride: the composite tensor's own.

    Raises:
        CheckpointError: there is no such class.
    """
    kind: object = sys.modules.get(module)
    for each in name.split("."):
        kind = getattr(kind, each, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise CheckpointError(
            f"the checkpoint holds tensors of class {module}.{name}, which is not imported: import {module} before "
            "you load it"
        )
    joined: Tensor = kind.__tensor_unflatten__(dict(parts), context, shape, stride)
    return joined


def plain_tensors(value: Tensor) -> list[Tensor]:
    """Return the tensors that hold a tensor's values: itself, or the innermost parts of a composite one."""
    if not is_composite(value):
        return [value]
    return [plain for part in parts_of(value)[0].values() for plain in plain_tensors(part)]
