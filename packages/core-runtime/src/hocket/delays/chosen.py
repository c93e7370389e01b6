"""Delays of some ranks: always the same ones, or others in each step.

Source: S. Li, T. Ben-Nun, S. Di Girolamo, D. Alistarh, T. Hoefler, "Taming Unbalanced Training Workloads in
Deep Learning with Partial Collective Operations" (eager-SGD), PPoPP 2020, sections 7.2.1 and 7.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket import draws
from hocket.delays.api import Delays, check_seconds

__all__ = ["Fixed", "RandomSubset"]


@dataclass(frozen=True)
class Fixed(Delays):
    """The same ranks in every step: slower machines.

    Attributes:
        ranks: which, each once.
        seconds: how long each of them is held up.
    """

    ranks: list[int]
    seconds: float

    def __post_init__(self) -> None:
        if any(rank < 0 for rank in self.ranks) or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks is {self.ranks}; allowed: different ranks, from 0")
        check_seconds("seconds", self.seconds)

    def check_size(self, size: int) -> None:
        if max(self.ranks, default=0) >= size:
            raise ValueError(f"ranks is {self.ranks}; allowed: ranks from 0 to {size - 1}")

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        delays = np.zeros(size)
        delays[self.ranks] = self.seconds
        return delays


@dataclass(frozen=True)
class RandomSubset(Delays):
    """A few ranks, others in each step, all subsets being equally likely: noise of the system.

    Drawn from (seed, step). In the paper 1 of 8 ranks by 0.2, 0.3 or 0.4 s, and 4 of 64 by 0.3 or 0.46 s.

    Attributes:
        count: how many ranks, 0 or more.
        seconds: how long each of them is held up.
    """

    count: int
    seconds: float

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count is {self.count}; allowed: 0 or more")
        check_seconds("seconds", self.seconds)

    def check_size(self, size: int) -> None:
        if self.count > size:
            raise ValueError(f"count is {self.count}; allowed: 0 to {size}, the number of ranks")

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        delays = np.zeros(size)
        delays[draws.permutation(size, "delays", seed, step)[: self.count]] = self.seconds
        return delays
