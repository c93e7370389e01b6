"""The order of additions in which `iallreduce` sums, where Hocket does the adding itself.

Pairwise in a binary tree whose left half is the largest power of two, ((0+1)+(2+3))+4 for five ranks: for a power of
two the order of recursive doubling. Every rank, and every transport that uses this, gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.arrays import Array

# Elements summed at a time: what is read, the partial sums and the results stay in a core's own cache. (With half of
# it calls cost more than they save, with twice as much the cache is too small.)
_BLOCK = 32_768


def tree_sum(arrays: Sequence[Array]) -> Array:
    """Return the elementwise sum of `arrays` as a new array.

    Overflow wraps (integers) or gives Inf (floats), as in MPI.

    Args:
        arrays: at least one; the same shape and dtype.
    """
    total = np.empty_like(arrays[0])
    TreeSum(len(arrays), total.dtype)([array.reshape(-1) for array in arrays], total.reshape(-1))
    return total


class TreeSum:
    """A sum of `num_arrays` flat arrays into another, without allocating.

    Args:
        num_arrays: number of arrays, at least 1.
        dtype: of all of them.
    """

    def __init__(self, num_arrays: int, dtype: np.dtype[np.generic]) -> None:
        depth = max(0, (num_arrays - 1).bit_length() - 1)
        self._partial = np.empty((depth, _BLOCK), dtype=dtype)

    def __call__(self, arrays: Sequence[Array], out: Array, *copies: Array) -> None:
        """Write the sum into `out` and into each of `copies`.

        Args:
            arrays: [n] each, flat and contiguous.
            out: like them; the memory of the first of them, or of none.
            copies: like them; each the memory of any one of them, or of none.
        """
        with np.errstate(all="ignore"):
            for start in range(0, out.size, _BLOCK):
                block = slice(start, start + _BLOCK)
                total = out[block]
                self._sum([array[block] for array in arrays], total, 0)
                for copy in copies:
                    copy[block] = total

    def _sum(self, blocks: list[Array], out: Array, depth: int) -> None:
        if len(blocks) == 1:
            out[...] = blocks[0]
        elif len(blocks) == 2:
            np.add(blocks[0], blocks[1], out=out)
        else:
            half = 1 << (len(blocks) - 1).bit_length() - 1
            self._sum(blocks[:half], out, depth)
            right = blocks[half:]
            if len(right) == 1:
                np.add(out, right[0], out=out)
            else:
                partial = self._partial[depth, : out.size]
                self._sum(right, partial, depth + 1)
                np.add(out, partial, out=out)


def weighted_sum(arrays: Sequence[Array], weights: Sequence[float], out: Array) -> None:
    """Write the sum of `weights[i] * arrays[i]` into `out`, in order; all arrays except the first are overwritten.

    Args:
        arrays: at least one, [n] floats, flat and contiguous; `out` overlaps none of them.
        weights: one for each.
        out: [n], of the same dtype.
    """
    for start in range(0, out.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        np.multiply(arrays[0][block], weights[0], out=out[block])
        for array, weight in zip(arrays[1:], weights[1:], strict=True):
            np.multiply(array[block], weight, out=array[block])
            np.add(out[block], array[block], out=out[block])
