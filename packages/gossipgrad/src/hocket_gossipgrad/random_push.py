"""Random gossip, the baseline: each rank draws a receiver of its own, whoever the others draw.

Source: M. Blot, D. Picard, M. Cord, N. Thome, "Gossip training for deep learning" (GoSGD), 2016, arXiv:1611.09726,
algorithms 3 and 4, where each rank sends in every step; P. Jin et al., "How to scale distributed deep learning?",
2016, arXiv:1611.04581. Daily et al. 2018, sec. 4.2, on what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from hocket.api import Neighbours, Topology, draws


@dataclass(frozen=True)
class RandomPush(Topology):
    """Random pushes: each rank gives half of its value to another one, drawn uniformly for each (round, segment).

    Unbalanced: a rank that many have drawn receives many messages, and 1/e of the ranks receive none. W's columns
    sum to 1 and its rows do not, so that averaging needs push-sum, whose weights are GoSGD's.

    Attributes:
        seed: the seed of the draws, 0 to 2**64 - 1; the same on every rank.

    Raises:
        ValueError: the seed is not in its range.
    """

    rows_sum_to_one: ClassVar[bool] = False

    seed: int = 0

    def __post_init__(self) -> None:
        draws.check_seed(self.seed)

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the rank that this one has drawn, and the ranks that have drawn it."""
        if size == 1:
            return Neighbours((), (), (), 1.0)
        receivers = _receivers(size, self.seed, round, segment)
        sources = tuple(source for source, to in enumerate(receivers) if to == rank)
        return Neighbours((receivers[rank],), (0.5,), sources, 0.5)


@lru_cache(maxsize=64)
def _receivers(size: int, seed: int, round: int, segment: int) -> list[int]:
    """Return the receiver of each rank, by rank."""
    distances = 1 + draws.below(np.full(size, size - 1), "push", seed, round, segment)
    receivers: list[int] = ((np.arange(size) + distances) % size).tolist()
    return receivers
