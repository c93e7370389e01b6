"""Rotation of partners: every ceil(log2 p) steps the ranks take other places in a topology.

Source: Daily et al. 2018, sec. 4.5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from hocket.api import Neighbours, Topology, draws
from hocket_gossipgrad.dissemination import num_dimensions


class Shuffles(StrEnum):
    """Sequences of shuffles of the ranks."""

    FRESH = "fresh"
    FIXED = "fixed"


@dataclass(frozen=True)
class Rotated(Topology):
    """A topology whose ranks are shuffled anew for each block of ceil(log2 p) rounds.

    Block b's order is a uniform permutation drawn from (seed, b); in block 0 each rank has its own place. Over
    dissemination or a hypercube, fresh shuffles let every ordered pair of ranks exchange directly, with probability
    0.999 within ceil(log2 p) + (p - 1) (2 ln p + 7) rounds: a block joins a given pair with chance
    k / (p - 1), k = ceil(log2 p), so that b blocks leave one of p (p - 1) pairs apart with a chance of at most
    p**2 exp(-b k / (p - 1)).

    The paper has p shuffles, used again and again. They leave some ordered pairs apart for ever, of dissemination
    p (p - 1) (1 - k / (p - 1))**p in expectation: 0.6 at p = 8, 3.6 at 32, 11.5 at 128.

    Attributes:
        topology: the topology in which the shuffled ranks take their places; it gets the same round numbers.
        shuffles: `fresh`: a new shuffle in each block; `fixed`: the paper's p shuffles in turn, the first of which
            changes nothing.
        seed: the seed of the draws, 0 to 2**64 - 1; the same on every rank.

    Raises:
        ValueError: the seed is not in its range.
    """

    topology: Topology
    shuffles: Shuffles = Shuffles.FRESH
    seed: int = 0

    def __post_init__(self) -> None:
        draws.check_seed(self.seed)

    @property
    def rows_sum_to_one(self) -> bool:  # type: ignore[override]
        return self.topology.rows_sum_to_one

    @property
    def columns_sum_to_one(self) -> bool:  # type: ignore[override]
        return self.topology.columns_sum_to_one

    @property
    def differs_by_segment(self) -> bool:  # type: ignore[override]
        return self.topology.differs_by_segment

    def check_size(self, size: int) -> None:
        """Refuse the sizes that the rotated topology refuses."""
        self.topology.check_size(size)

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the ranks in the places that are neighbours of this rank's place."""
        block = round // max(1, num_dimensions(size))
        if self.shuffles is Shuffles.FIXED:
            block %= size
        if block == 0:
            return self.topology.neighbours(rank, size, round, segment)
        order, places = _shuffle(size, self.seed, block)
        found = self.topology.neighbours(places[rank], size, round, segment)
        return Neighbours(
            send_to=tuple(order[place] for place in found.send_to),
            send_weights=found.send_weights,
            receive_from=tuple(order[place] for place in found.receive_from),
            self_weight=found.self_weight,
        )


@lru_cache(maxsize=256)
def _shuffle(size: int, seed: int, block: int) -> tuple[list[int], list[int]]:
    """Return the rank in each place, and each rank's place."""
    order = draws.permutation(size, "rotation", seed, block)
    return order.tolist(), order.argsort().tolist()
