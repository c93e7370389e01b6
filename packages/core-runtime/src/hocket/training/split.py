"""A batch as several smaller ones."""

from __future__ import annotations

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hocket.errors import UserError
from hocket.plain import Batch
from hocket.session.data.batch import num_samples


def split(batch: Batch, size: int) -> list[Batch]:
    """Return the samples of a batch in batches of `size`, the last with the rest, as views.

    Args:
        batch: any nesting of tuples, lists and dictionaries of tensors, each [samples, ...].
        size: 1 or more.

    Raises:
        UserError: it holds a value without one row for each sample.
    """
    num = num_samples(batch)
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != num:
            found = f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"{type(leaf).__name__}"
            raise UserError(
                f"accumulate: a batch of {num} samples holds {found}, but only tensors with a row for each sample "
                "can be split: leave accumulate out, or make batches of such tensors only"
            )
    return [
        tree_map(lambda leaf, start=start: leaf[start : start + size], batch) for start in range(0, num, size)
    ]
