"""The sum that `iallreduce` gives: a fixed order of additions, so that every rank has the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.transport.peer import Array

__all__ = ["tree_sum"]


def tree_sum(arrays: Sequence[Array]) -> Array:
    """Return the elementwise sum of `arrays` as a new array.

    Added pairwise in a binary tree whose left half is the largest power of two: ((0+1)+(2+3))+4 for five. For
    a power of two this is the order of recursive doubling. Overflow wraps (integers) or gives Inf (floats),
    as in MPI. At most ceil(log2(p)) + 1 temporary arrays live at a time.

    Args:
        arrays: at least one; the same shape and dtype.
    """
    with np.errstate(all="ignore"):
        return _sum(arrays) if len(arrays) > 1 else arrays[0].copy()


def _sum(arrays: Sequence[Array]) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    half = 1 << (len(arrays) - 1).bit_length() - 1
    left = _sum(arrays[:half])
    return np.add(left, _sum(arrays[half:]), out=left if half > 1 else None)
