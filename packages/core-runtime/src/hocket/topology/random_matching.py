"""Ranks meet in random pairs, others in each round.

Source: S. Boyd, A. Ghosh, B. Prabhakar, D. Shah, "Randomized Gossip Algorithms", IEEE Transactions on
Information Theory 52(6), 2006, in its synchronous form, where many disjoint pairs average at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket import draws
from hocket.arrays import MixingRows
from hocket.topology.api import Neighbours, Topology

__all__ = ["RandomMatching"]


@dataclass(frozen=True)
class RandomMatching(Topology):
    """A uniformly drawn matching for each (round, segment): W[i, i] = W[i, j] = 1/2 where i and j are a pair.

    Of an odd number of ranks one stays alone, with W[i, i] = 1. W is symmetric, doubly stochastic and a
    projection, W @ W = W. The expected W is (1/2) I + 1 / (2 (n - 1)) (J - I) for even n, J all ones.

    Attributes:
        seed: of the draws, 0 to 2**64 - 1; the same on every rank.

    Raises:
        ValueError: the seed is not in its range.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        draws.check_seed(self.seed)

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the rank's partner, or nobody."""
        order = self._order(size, round, segment).tolist()
        place = order.index(rank) ^ 1
        if place == size:
            return Neighbours((), (), (), 1.0)
        partner = (order[place],)
        return Neighbours(send_to=partner, send_weights=(0.5,), receive_from=partner, self_weight=0.5)

    def mixing_rows(self, size: int, round: int, segment: int) -> MixingRows:
        order = self._order(size, round, segment)
        ranks = np.arange(size)
        partners = ranks.copy()
        pairs = order[: size - size % 2].reshape(-1, 2)
        partners[pairs] = pairs[:, ::-1]
        paired = partners != ranks
        starts = np.concatenate([[0], np.cumsum(1 + paired)])
        is_term = np.stack([np.ones_like(paired), paired], axis=1)
        sources = np.stack([ranks, partners], axis=1)[is_term]
        return MixingRows(starts, sources, np.repeat(np.where(paired, 0.5, 1.0), 1 + paired))

    def _order(self, size: int, round: int, segment: int) -> NDArray[np.int64]:
        """Return a random order of the ranks, in which pairs are the places 0 and 1, 2 and 3, ..."""
        return draws.permutation(size, "matching", self.seed, round, segment)
