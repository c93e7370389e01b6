"""A batch as one piece of memory, for messages, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hocket.api import Array, messages, plain

# Bytes to which each tensor's start is aligned, enough for every dtype.
_ALIGNMENT = 64


@dataclass(frozen=True)
class BatchForm:
    """The structure, dtypes and shapes of a batch, without its numbers, and the layout of its packed form."""

    form: messages.Form

    @property
    def nbytes(self) -> int:
        """The size of the packed batch in bytes."""
        return sum(_padded(tensor) for tensor in self.form.tensors)

    def unpack(self, packed: Array) -> plain.Batch:
        """Return the batch, in memory of its own.

        Args:
            packed: uint8 [nbytes].
        """
        return messages.put_together(self.form, [view.clone() for view in self._views(packed)])

    def _views(self, packed: Array) -> list[Tensor]:
        """Return the tensors as views of the packed memory."""
        memory = torch.from_numpy(packed)
        views, start = [], 0
        for tensor in self.form.tensors:
            stop = start + tensor.nbytes
            views.append(memory[start:stop].view(tensor.dtype).view(tensor.shape))
            start += _padded(tensor)
        return views


def pack(batch: plain.Batch) -> tuple[BatchForm, Array]:
    """Copy a batch into memory of its own.

    Args:
        batch: a tensor in host memory, or tuples, lists and dictionaries of such, in any nesting.

    Returns:
        Its form, and uint8 [form.nbytes].

    Raises:
        TypeError: it holds something other than tensors; the error names it.
        UserError: it holds them in something that no message can hold; the error names its place.
    """
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"a batch holds a {type(leaf).__name__}, but ranks can exchange only tensors, alone or in tuples, "
                "lists and dictionaries: turn it into a tensor, for instance in the loader's collate_fn"
            )
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            raise TypeError(
                f"a batch holds a {leaf.layout} tensor on {leaf.device}, but ranks exchange samples in host memory: "
                "let the loader give dense CPU tensors, and move them to their device in the training loop"
            )
    taken, tensors = messages.take_apart(batch)
    form = BatchForm(taken)
    packed = np.zeros(form.nbytes, np.uint8)
    for view, tensor in zip(form._views(packed), tensors, strict=True):
        view.copy_(tensor.detach())
    return form, packed


def _padded(tensor: messages.TensorForm) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
