"""The mean of several ranks' files: tensors, sections, and why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.checkpoint.files import StateFile
from hocket.checkpoint.tree import parts_within


def mean_of_tensor(files: Sequence[StateFile], name: str, weights: Sequence[float] | None = None) -> Tensor:
    """Return a floating-point tensor's mean over the files, of its own dtype; of another, the first file's.

    It accumulates in float64, one file after the other; what is equal in all stays, to the bit.

    Args:
        files: the ranks' files.
        name: the tensor's name.
        weights: the weight of each file; None for equal ones.
    """
    first = files[0].tensor(name)
    if not first.is_floating_point():
        return first
    weights = weights or [1.0] * len(files)
    total = first.to(torch.float64) * weights[0]
    equal = True
    for file, weight in zip(files[1:], weights[1:], strict=True):
        other = file.tensor(name)
        equal = equal and torch.equal(first, other)
        total.add_(other, alpha=weight)
    return first if equal else total.div_(sum(weights)).to(first.dtype)


def mean_of_section(files: Sequence[StateFile], section: str) -> Any:
    """Return the first file's section, with the means of floating-point tensors of one shape in all files."""

    alone = parts_within(files[0].structure(section))

    def tensor(name: str) -> Tensor:
        alike = name not in alone and all(file.describe(name) == files[0].describe(name) for file in files)
        return mean_of_tensor(files if alike else files[:1], name)

    return files[0].read(section, tensor)


def mean_of_mappings(files: Sequence[StateFile], path: str) -> dict[str, dict[str, Tensor]]:
    """Return the mean of each tensor below a path over the files that have it, by its last two keys.

    Args:
        files: the ranks' files.
        path: the keys from the section on, with slashes between them.
    """
    having: dict[str, list[StateFile]] = {}
    for file in files:
        for name in (n for n in file.names(path.partition("/")[0]) if n.startswith(f"{path}/")):
            having.setdefault(name, []).append(file)
    means: dict[str, dict[str, Tensor]] = {}
    for name, those in having.items():
        first, _, second = name.removeprefix(f"{path}/").rpartition("/")
        means.setdefault(first, {})[second] = mean_of_tensor(those, name)
    return means


def why_no_mean(files: Sequence[StateFile], section: str) -> str:
    """Return the reason why a section's tensors differ in name or shape between files, or an empty string."""
    first = files[0]
    for file in files[1:]:
        if _in_order(file.structure(section)) != _in_order(first.structure(section)):
            return f"its structure differs between {first.path.name} and {file.path.name}"
        for name in first.names(section):
            mine, other = first.describe(name), file.describe(name)
            if mine != other:
                return f"{name} is {mine} in {first.path.name} and {other} in {file.path.name}"
    return ""


def _in_order(structure: object) -> object:
    """Return a structure with its mappings' keys sorted: optimizers order them by their first gradients."""
    if isinstance(structure, list):
        return [_in_order(item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if "dict" in structure:
        return {"dict": sorted(([key, _in_order(value)] for key, value in structure["dict"]), key=repr)}
    return {kind: _in_order(content) for kind, content in structure.items()}
