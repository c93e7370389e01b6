"""Arrays in host memory, and the rows of a mixing matrix: what kernels, topologies and transports share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: The memory that a lane sends and receives: C-contiguous, on `Peer.device`. On "cpu" it is a NumPy array, elsewhere a
#: torch tensor, which is written down as one: hosts' lanes and kernels see none.
Buffer = Array


class MixingRows(NamedTuple):
    """The rows of a mixing matrix without zeros, one for each rank of a lane, in the order of addition.

    Attributes:
        starts: int64 [ranks + 1]; row i has the entries from starts[i] up to starts[i + 1], at least one.
        sources: int64 [entries], the rank whose vector is added.
        weights: float64 [entries], rounded to the vectors' dtype before they are used.
    """

    starts: Array
    sources: Array
    weights: Array


def as_bytes(data: Array) -> Array:
    """Return the memory of contiguous `data` as uint8 [nbytes]."""
    return data.reshape(-1).view(np.uint8)


def is_same_memory(one: Array, other: Array) -> bool:
    """Return whether two contiguous arrays of one shape and dtype are the same memory; False for empty ones."""
    return one.nbytes > 0 and one.__array_interface__["data"][0] == other.__array_interface__["data"][0]
