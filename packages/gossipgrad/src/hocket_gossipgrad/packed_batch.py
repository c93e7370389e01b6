"""A batch as one piece of memory, for messages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hocket.api import Array, messages, plain


def pack(batch: plain.Batch) -> tuple[messages.Form, Array]:
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
    form, tensors = messages.take_apart(batch)
    return form, form.filled(tensors)
