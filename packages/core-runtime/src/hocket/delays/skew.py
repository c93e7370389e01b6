"""Delays of all ranks, from the shortest to the longest in even steps.

Source: eager-SGD (Li et al., PPoPP 2020), section 7.1 (32 ranks skewed by 1 to 32 ms) and section 7.2.3 (8 ranks
skewed by 50 to 400 ms, shifted after each step).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.delays.api import Delays, check_seconds

__all__ = ["LinearSkew", "ShiftingSkew"]


@dataclass(frozen=True)
class LinearSkew(Delays):
    """Rank r of P is held up by shortest_s + (longest_s - shortest_s) r / (P - 1), in every step.

    Attributes:
        shortest_s: rank 0's delay, in seconds; that of a single rank, too.
        longest_s: the last rank's, in seconds; not below shortest_s.
    """

    shortest_s: float
    longest_s: float

    def __post_init__(self) -> None:
        check_seconds("shortest_s", self.shortest_s)
        check_seconds("longest_s", self.longest_s)
        if self.shortest_s > self.longest_s:
            raise ValueError(
                f"longest_s is {self.longest_s}; allowed: {self.shortest_s}, shortest_s, or more"
            )

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        return np.linspace(self.shortest_s, self.longest_s, size)


@dataclass(frozen=True)
class ShiftingSkew(LinearSkew):
    """A linear skew that moves on by one rank after each step: the paper's severe imbalance.

    In step t rank r has the delay that rank (r + t) mod P has in a linear skew. In P steps each rank has had each delay
    once: no rank is slower than another in the long run, and every step has a slowest one.

    Attributes:
        shortest_s: the shortest delay, in seconds.
        longest_s: the longest, in seconds; not below shortest_s.
    """

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        return np.roll(super().of_step(step, size, seed), -step)
