"""Passes cut into pieces that run on several threads; Numba's own threading layers are not used.

Its `workqueue` layer aborts the process when two threads call parallel kernels, and OpenMP's does not survive a fork.
Here the kernels run on one thread each, without the GIL, on as many threads as torch may use: one for a rank is the
common case, and then the calling thread does all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

_T = TypeVar("_T")

# The smallest piece: with smaller ones, handing out takes longer than the work.
_SMALLEST_PIECE = 1 << 18

# A vector unit's favourite boundary, and a whole number of the kernels' tiles.
_ALIGNMENT = 1024


def in_pieces(numel: int, work: Callable[[int, int], _T]) -> list[_T]:
    """Return the results of `work(start, stop)` for consecutive pieces of 0 to `numel`, in their order.

    Args:
        numel: elements.
        work: releases the GIL, and may run on several threads at once.
    """
    num_pieces = max(1, min(torch.get_num_threads(), numel // _SMALLEST_PIECE))
    if num_pieces == 1:
        return [work(0, numel)]
    length = -(-numel // num_pieces // _ALIGNMENT) * _ALIGNMENT
    bounds = [min(piece * length, numel) for piece in range(num_pieces + 1)]
    pool = _pool(num_pieces - 1, os.getpid())
    first, *rest = itertools.pairwise(bounds)
    others = [pool.submit(work, *piece) for piece in rest]
    own = work(*first)
    return [own, *(other.result() for other in others)]


# By process: a forked child has none of its parent's threads.
@lru_cache(maxsize=4)
def _pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="hocket-redsync")
