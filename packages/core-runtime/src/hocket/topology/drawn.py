"""Topologies that draw another graph for each round and segment: random pairs, and directed edges.

Source: for random pairs S. Boyd, A. Ghosh, B. Prabhakar, D. Shah, "Randomized Gossip Algorithms", IEEE Transactions on
Information Theory 52(6), 2006, in its synchronous form, where many disjoint pairs average at once. For the directed
graph D. Kempe, A. Dobra, J. Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003, which asks only
that every rank share its value out; the graph itself is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hocket import draws
from hocket.arrays import MixingRows
from hocket.topology.api import Neighbours, Topology


@dataclass(frozen=True)
class RandomMatching(Topology):
    """A uniformly drawn matching for each (round, segment): W[i, i] = W[i, j] = 1/2 for a pair i, j.

    Of an odd number of ranks one stays alone, with W[i, i] = 1. W is symmetric, doubly stochastic and a
    projection, W @ W = W. The expected W is (1/2) I + 1 / (2 (n - 1)) (J - I) for even n, J all ones.

    Attributes:
        seed: the seed of the draws, 0 to 2**64 - 1; the same on every rank.

    Raises:
        ValueError: the seed is not in its range.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        draws.check_seed(self.seed)

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the rank's partner, or no neighbour."""
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


@dataclass(frozen=True)
class IrregularDirected(Topology):
    """A directed random graph for each round: each rank sends to the next, and to others with probability `density`.

    W[i, j] = 1 / (1 + number of ranks that j sends to). W's columns sum to 1 and its rows do not, so that only
    push-sum finds the mean. It is meant for trying that out, and has no other use.

    Attributes:
        density: the share of possible edges, besides the ring's, 0 to 1.
        seed: the seed of the draws, 0 to 2**64 - 1; the same on every rank.

    Raises:
        ValueError: density or seed is not in its range.
    """

    rows_sum_to_one: ClassVar[bool] = False

    density: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.density <= 1:
            raise ValueError(f"density must be 0 to 1, not {self.density}")
        draws.check_seed(self.seed)

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the ranks that this one sends to, and those that send to it."""
        everybodys = _receivers(self.density, self.seed, size, round, segment)
        own = everybodys[rank]
        weight = 1 / (1 + len(own))
        sources = tuple(source for source, receivers in enumerate(everybodys) if rank in receivers)
        return Neighbours(own, (weight,) * len(own), sources, weight)


@lru_cache(maxsize=64)
def _receivers(density: float, seed: int, size: int, round: int, segment: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that each rank sends to, by rank."""
    edges = draws.words(size * size, "directed", seed, round, segment).reshape(size, size) < density * 2.0**64
    return tuple(
        tuple(to for to in range(size) if to != rank and (edges[rank, to] or to == (rank + 1) % size))
        for rank in range(size)
    )
