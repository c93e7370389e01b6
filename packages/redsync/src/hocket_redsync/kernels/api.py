"""The interface of kernels: one pass that accumulates a parameter's gradient and picks out large elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.api import Array

#: The update of a pass before it picks, as a number for the loops; advance.cu has the same numbers.
PICK, PLAIN, MOMENTUM, NESTEROV = range(4)

#: A floor that only NaN reaches, for float32 and float64 by their bytes: one above Inf.
NOTHING_PASSES = {4: 0x7F800001, 8: 0x7FF0000000000001}

#: The floor that everything but zeros reaches.
SMALLEST_KEY = 1


class Ranking(Enum):
    """An order of elements by keys; an element is large if its key is at least a floor.

    A key is the bits of the value as a whole number, after a flip and a mask. Bits of non-negative floats are ordered
    as the floats are, denormals included. Comparing whole numbers needs no care for NaN, so loops become vector
    instructions. Floors are 1 or more, so zeros are never large, nor are values of the other sign.

    Source: RedSync, section 2.1 (magnitude) and 2.2 (the k largest, and in the next step the k smallest).
    """

    MAGNITUDE = "magnitude"
    LARGEST = "largest"
    SMALLEST = "smallest"

    def flip_and_mask(self, itemsize: int) -> tuple[int, int]:
        """Return the operands of the bits' xor and of the following and, as signed numbers of `itemsize` bytes."""
        sign, rest = -(1 << (8 * itemsize - 1)), (1 << (8 * itemsize - 1)) - 1
        return {"magnitude": (0, rest), "largest": (0, -1), "smallest": (sign, -1)}[self.value]

    def keys(self, values: Array) -> Array:
        """Return the keys of float32 or float64 values, as int32 or int64."""
        integer = np.dtype(f"i{values.dtype.itemsize}").type
        flip, mask = self.flip_and_mask(values.dtype.itemsize)
        keys: Array = (values.view(integer) ^ integer(flip)) & integer(mask)
        return keys


@dataclass(frozen=True, eq=False)
class Memory:
    """One parameter's share of a segment, all flat, [n], of one dtype (float32 or float64) and device.

    Attributes:
        given: this round's gradient G; kernels only read it.
        residual: V.
        velocity: u, or None where momentum is not corrected.
        start: the place of the first element in the segment.
    """

    given: Tensor
    residual: Tensor
    velocity: Tensor | None
    start: int


@dataclass(frozen=True, eq=False)
class Update:
    """The update of a parameter's residual in a round, in the order of torch's SGD.

    g = G + decay * x; without momentum V <- V + g; with it u <- momentum * u + g, and V <- V + u, or with Nesterov
    V <- V + (g + momentum * u).

    Attributes:
        momentum: m; 0 for none, which leaves u as it is.
        nesterov: true: look ahead.
        decay: weight decay times the factor that G has been multiplied by.
        parameter: x, [n] in the segment's order; None where `decay` is 0.
    """

    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0
    parameter: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.parameter is not None) == (self.decay != 0)


def mode_of(update: Update | None) -> int:
    """Return `PICK`, `PLAIN`, `MOMENTUM` or `NESTEROV`."""
    if update is None:
        return PICK
    if not update.momentum:
        return PLAIN
    return NESTEROV if update.nesterov else MOMENTUM


@dataclass(frozen=True, eq=False)
class Found:
    """The elements that passed a floor, in host memory.

    Attributes:
        indices: places in the segment, int32, as many as there was room for.
        values: V there.
        count: the number that passed.
    """

    indices: Array
    values: Array
    count: int

    @property
    def complete(self) -> bool:
        """True if there was room for all."""
        return self.count == len(self.indices)


class Kernels(ABC):
    """The passes over memory on one kind of device. Without state: any thread may call them."""

    @abstractmethod
    def is_finite(self, data: Tensor) -> bool:
        """Return whether no element of a flat tensor is NaN or Inf; one pass that reads."""

    @abstractmethod
    def advance(
        self, memory: Memory, update: Update | None, ranking: Ranking, floor: int, capacity: int
    ) -> Any:
        """Update a parameter's residual and pick the elements with a key of at least `floor`, in one pass.

        Args:
            memory: the parameter's.
            update: the update before picking; None to pick only.
            ranking: gives the keys.
            floor: 1 or more.
            capacity: the number of elements that there is room for.

        Returns:
            A handle for `collect`; on a GPU the pass may still be under way.
        """

    @abstractmethod
    def collect(self, handles: Sequence[Any]) -> list[Found]:
        """Return the elements that the passes have found; waits for a device once, not for each."""

    @abstractmethod
    def sample(self, residual: Tensor, size: int) -> Array:
        """Return about `size` elements of V, evenly spread, in host memory."""

    @abstractmethod
    def clear(self, flat: Tensor, indices: Array) -> None:
        """Set a flat tensor to 0 at `indices`, int32 in host memory."""
