"""A batch as one piece of memory, for messages, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hocket.transport.peer import Array

__all__ = ["BatchForm", "pack"]

# Where tensors begin, so that each is aligned for its dtype.
_ALIGNMENT = 64


@dataclass(frozen=True)
class BatchForm:
    """What a batch is besides its numbers.

    Attributes:
        tree: its tuples, lists and dictionaries, with numbers, from 0, in the places of tensors.
        tensors: dtype and shape of each of these.
    """

    tree: Any
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """How many bytes the packed batch has."""
        return sum(_padded(dtype, shape) for dtype, shape in self.tensors)

    def unpack(self, packed: Array) -> Any:
        """Return the batch, in memory of its own.

        Args:
            packed: uint8 [nbytes].
        """
        tensors = [view.clone() for view in self._views(packed)]
        return tree_map(tensors.__getitem__, self.tree)

    def _views(self, packed: Array) -> list[Tensor]:
        """Return the tensors as views of the packed memory."""
        memory = torch.from_numpy(packed)
        views, start = [], 0
        for dtype, shape in self.tensors:
            stop = start + _num_bytes(dtype, shape)
            views.append(memory[start:stop].view(dtype).view(shape))
            start += _padded(dtype, shape)
        return views


def pack(batch: Any) -> tuple[BatchForm, Array]:
    """Copy a batch into memory of its own.

    Args:
        batch: a tensor in host memory, or tuples, lists and dictionaries of such, in any nesting.

    Returns:
        Its form, and uint8 [form.nbytes].

    Raises:
        TypeError: it holds something else; says what.
    """
    leaves, structure = tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"a batch holds a {type(leaf).__name__}, and only tensors travel, alone or in tuples, lists and "
                "dictionaries: turn it into a tensor, for instance in the loader's collate_fn"
            )
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            raise TypeError(
                f"a batch holds a {leaf.layout} tensor on {leaf.device}, and samples travel in host memory: let the "
                "loader give dense CPU tensors, and move them to their device in the training loop"
            )
    tree = tree_unflatten(range(len(leaves)), structure)
    form = BatchForm(tree, tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves))
    packed = np.zeros(form.nbytes, np.uint8)
    for view, leaf in zip(form._views(packed), leaves, strict=True):
        view.copy_(leaf.detach())
    return form, packed


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _padded(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-_num_bytes(dtype, shape) // _ALIGNMENT) * _ALIGNMENT
