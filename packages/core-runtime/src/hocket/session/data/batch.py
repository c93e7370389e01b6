"""A batch as loaders yield it: the model's inputs, the target of its output, the number of samples.

Imports no torch until it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hocket.plain import Batch

if TYPE_CHECKING:
    from torch import nn


def parts_of(batch: Batch) -> tuple[Batch, Batch]:
    """Return inputs and target of a batch: the parts of a pair, or twice the mapping that holds both.

    Raises:
        ValueError: it does not have two parts.
    """
    if isinstance(batch, Mapping):
        return batch, batch
    inputs, target = batch
    return inputs, target


def call(model: nn.Module, inputs: Batch) -> Batch:
    """Call a model with inputs, a mapping by name, a tuple or list in order; return its output.

    An nn.Sequential passes one value on, so it gets them as they are, as the stages of a pipeline do.
    """
    from torch import nn

    if isinstance(model, nn.Sequential):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def num_samples(batch: Batch) -> int:
    """Return the first length of the target's first tensor; of a target without tensors, its own."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    _, target = parts_of(batch)
    if isinstance(target, Tensor):
        return len(target)
    tensors = (leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor))
    return len(next(tensors, target))
