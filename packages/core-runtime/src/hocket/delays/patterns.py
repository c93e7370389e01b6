"""Delays of chosen ranks, of random ones, and of all ranks from the shortest to the longest.

Source: S. Li, T. Ben-Nun, S. Di Girolamo, D. Alistarh, T. Hoefler, "Taming Unbalanced Training Workloads in
Deep Learning with Partial Collective Operations" (eager-SGD), PPoPP 2020: section 7.1 (32 ranks skewed by 1 to 32 ms),
7.2.1 and 7.2.2 (random subsets), 7.2.3 (8 ranks skewed by 50 to 400 ms, shifted after each step).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket import draws
from hocket.delays.api import Delays, check_seconds


@dataclass(frozen=True)
class Fixed(Delays):
    """A delay of the same ranks in every step, as if their machines were slower.

    Attributes:
        ranks: the delayed ranks, each once.
        seconds: the delay of each delayed rank.
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
    """A delay of a random subset of ranks in each step, all equally likely, like system noise.

    Drawn from (seed, step). In the paper 1 of 8 ranks by 0.2, 0.3 or 0.4 s, and 4 of 64 by 0.3 or 0.46 s.

    Attributes:
        count: number of delayed ranks, 0 or more.
        seconds: the delay of each delayed rank.
        fraction: the share of steps that have delays, drawn at random, 0 to 1.
    """

    count: int
    seconds: float
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count is {self.count}; allowed: 0 or more")
        check_seconds("seconds", self.seconds)
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}; allowed: 0 to 1")

    def check_size(self, size: int) -> None:
        if self.count > size:
            raise ValueError(f"count is {self.count}; allowed: 0 to {size}, the number of ranks")

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        delays = np.zeros(size)
        if int(draws.words(1, "delayed", seed, step)[0]) < self.fraction * 2.0**64:
            delays[draws.permutation(size, "delays", seed, step)[: self.count]] = self.seconds
        return delays


@dataclass(frozen=True)
class LinearSkew(Delays):
    """A linear skew: in every step, delays grow from `shortest_s` on rank 0 to `longest_s` on the last.

    Rank r of P is delayed by shortest_s + (longest_s - shortest_s) r / (P - 1).

    Attributes:
        shortest_s: rank 0's delay, in seconds, also if it is the only rank.
        longest_s: the last rank's delay, in seconds; not below shortest_s.
    """

    shortest_s: float
    longest_s: float

    def __post_init__(self) -> None:
        check_seconds("shortest_s", self.shortest_s)
        check_seconds("longest_s", self.longest_s)
        if self.shortest_s > self.longest_s:
            raise ValueError(
                f"longest_s is {self.longest_s}, but must be at least shortest_s, which is {self.shortest_s}"
            )

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        return np.linspace(self.shortest_s, self.longest_s, size)


@dataclass(frozen=True)
class ShiftingSkew(LinearSkew):
    """A linear skew that shifts by one rank after each step: the paper's severe imbalance.

    In step t rank r has the delay that rank (r + t) mod P has in a linear skew. In P steps each rank has had each delay
    once: no rank is slower than another in the long run, and every step has a slowest one.

    Attributes:
        shortest_s: the shortest delay, in seconds.
        longest_s: the longest delay, in seconds; not below shortest_s.
    """

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        return np.roll(super().of_step(step, size, seed), -step)
