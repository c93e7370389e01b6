"""Several ranks' states made one: what another number of ranks goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.checkpoint.tensor_file import StateFile

__all__ = ["mean_of_section", "mean_of_tensor", "why_no_mean"]


def mean_of_tensor(files: Sequence[StateFile], name: str, weights: Sequence[float] | None = None) -> Tensor:
    """Return a floating-point tensor's mean over the files, and the first file's of any other.

    It accumulates in float64, one file after the other.

    Args:
        weights: how much each file counts; all the same where None.
    """
    first = files[0].tensor(name)
    if not first.is_floating_point():
        return first
    weights = weights or [1.0] * len(files)
    total = first.to(torch.float64) * weights[0]
    for file, weight in zip(files[1:], weights[1:], strict=True):
        total.add_(file.tensor(name), alpha=weight)
    return total.div_(sum(weights)).to(first.dtype)


def mean_of_section(files: Sequence[StateFile], section: str) -> Any:
    """Return the first file's section, with the mean of each floating-point tensor that all have in one shape."""

    def tensor(name: str) -> Tensor:
        alike = all(file.describe(name) == files[0].describe(name) for file in files)
        return mean_of_tensor(files if alike else files[:1], name)

    return files[0].read(section, tensor)


def why_no_mean(files: Sequence[StateFile], section: str) -> str:
    """Return why a section does not hold the same tensors in all files; an empty string where it does."""
    first = files[0]
    for file in files[1:]:
        if _in_order(file.structure(section)) != _in_order(first.structure(section)):
            return f"it is not of the same form in {first.path.name} and {file.path.name}"
        for name in first.names(section):
            mine, other = first.describe(name), file.describe(name)
            if mine != other:
                return f"{name} is {mine} in {first.path.name} and {other} in {file.path.name}"
    return ""


def _in_order(structure: Any) -> Any:
    """Return a structure whose mappings have their keys in one order: optimizers keep that of their first gradients."""
    if isinstance(structure, list):
        return [_in_order(item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if "dict" in structure:
        return {"dict": sorted(([key, _in_order(value)] for key, value in structure["dict"]), key=repr)}
    return {kind: _in_order(content) for kind, content in structure.items()}
