"""A directed graph without symmetry, on which averaging needs push-sum.

Source: D. Kempe, A. Dobra, J. Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003, which asks
only that every rank share its value out; the graph itself is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from hocket import draws
from hocket.topology.api import Neighbours, Topology

__all__ = ["IrregularDirected"]


@dataclass(frozen=True)
class IrregularDirected(Topology):
    """Every rank sends to the next one, and each other rank with chance `density`: another graph in each round.

    W[i, j] = 1 / (1 + number of ranks that j sends to). W's columns sum to 1 and its rows do not, so that only
    push-sum finds the mean. Meant to try that out: a graph like this has no other virtue.

    Attributes:
        density: of the edges beside the ring's, 0 to 1.
        seed: of the draws, 0 to 2**64 - 1; the same on every rank.

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
        """Return whom this rank shares its value with, and who shares theirs with it."""
        everybodys = _receivers(self.density, self.seed, size, round, segment)
        own = everybodys[rank]
        weight = 1 / (1 + len(own))
        sources = tuple(source for source, receivers in enumerate(everybodys) if rank in receivers)
        return Neighbours(own, (weight,) * len(own), sources, weight)


@lru_cache(maxsize=64)
def _receivers(density: float, seed: int, size: int, round: int, segment: int) -> tuple[tuple[int, ...], ...]:
    """Return whom each rank sends to, by rank."""
    edges = draws.words(size * size, "directed", seed, round, segment).reshape(size, size) < density * 2.0**64
    return tuple(
        tuple(to for to in range(size) if to != rank and (edges[rank, to] or to == (rank + 1) % size))
        for rank in range(size)
    )
