"""SPARTA in NumPy, for all ranks at once: after a step all ranks average the same few elements of their parameters.

Which elements these are is drawn as `shared_random` documents it: a layer, padded to 64 bytes, is cut into k runs of
equal length, to one, and of each an element is drawn by (seed, round, layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from oracle import Vector

from hocket import draws

_ALIGNMENT = 8  # of float64


def count(density: float, size: int) -> int:
    """Return how many elements of a layer travel."""
    return max(1, round(density * _padded(size)))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass
class Sparta:
    """The method, with what of it is under way.

    Attributes:
        density: the share of elements that travel.
        every, starts: each layer is sent in each how manieth step, and in which of them, by layer; 0 where empty.
        delay: how many steps later the mean is merged: θ += mean - what θ was when it was sent.
    """

    density: float
    every: int = 1
    starts: Sequence[int] = ()
    delay: int = 0
    _rounds: dict[str, int] = field(default_factory=dict)
    _under_way: dict[tuple[int, str], Vector] = field(default_factory=dict)

    def step(self, step: int, theta: dict[str, Vector]) -> None:
        """Merge what was sent `delay` steps before, and send what is due, after a step from 1 on."""
        for index, layer in enumerate(theta):
            start = self.starts[index] if self.starts else 0
            if self.delay and (step - self.delay, layer) in self._under_way:
                theta[layer] += self._under_way.pop((step - self.delay, layer))
            if (step - start) % self.every:
                continue
            values = theta[layer]
            displacement = np.zeros_like(values)
            round = self._rounds[layer] = self._rounds.get(layer, -1) + 1
            drawn = self._drawn(values.shape[1], round, index)
            displacement[:, drawn] = values[:, drawn].mean(0) - values[:, drawn]
            if self.delay:
                self._under_way[step, layer] = displacement
            else:
                theta[layer] += displacement

    def _drawn(self, size: int, round: int, index: int) -> NDArray[np.int64]:
        numel, number = _padded(size), count(self.density, size)
        starts = np.arange(number + 1) * numel // number
        drawn = starts[:-1] + draws.below(np.diff(starts), "shared", 0, round, index)
        return drawn[drawn < size]
