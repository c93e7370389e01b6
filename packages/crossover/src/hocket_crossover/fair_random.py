"""Fair peer selection: everyone sends one copy and receives one, each segment over its own random graph.

Source: Yeo et al., "Crossover-SGD", section 3.2 and algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.api import MixingRows, Neighbours, Topology, draws
from hocket_crossover import derangements
from hocket_crossover.derangements import DrawKey
from hocket_crossover.rounds import Rounds

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class FairRandom(Topology):
    """W = (I + P) / 2, with a random permutation matrix P that has no fixed point.

    P is drawn anew for each round and segment. W is doubly stochastic. Rank i hears from rank j where P[i, j] = 1. Two
    ranks swap, one has no partner.

    Without a roulette every derangement is equally likely. This departs from the paper's algorithm 2, which goes
    from rank to rank and prefers some even if its table is uniform (of four ranks' nine derangements: 0.065 to
    0.194), and which may leave the last rank with nobody but itself.

    Attributes:
        seed: the seed of the draws, 0 to 2**64 - 1; the same on every rank.
        roulette: null, or a table of weights with a row for each rank. Ranks draw one after the other: rank i hears
            from rank j with weight roulette[i][j], among the ranks from which nobody hears yet. This is the table of
            the paper's algorithm 1; in section 3.2, rows are the sources. Weights are not negative, and zero on the
            diagonal. Rows need not sum to 1.

    Raises:
        ValueError: the seed is out of range, or the roulette is not such a table or makes a permutation impossible.
    """

    seed: int = 0
    roulette: Any = None

    def __post_init__(self) -> None:
        draws.check_seed(self.seed)
        if self.roulette is not None:
            object.__setattr__(self, "roulette", _checked(self.roulette))

    def __hash__(self) -> int:
        # Caches ask for it with each call, and a roulette has n**2 numbers.
        return hash((self.seed, self.roulette is None))

    def check_size(self, size: int) -> None:
        if self.roulette is not None and size != len(self.roulette):
            raise ValueError(
                f"the roulette of crossover.fair_random is for {len(self.roulette)} ranks, not for {size}: give it a "
                "row and a column for each rank, or leave it out"
            )

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the one rank to send to and the one to receive from."""
        self.check_size(size)
        if size == 1:
            return Neighbours((), (), (), 1.0)
        drawn = _rounds(self, size).of(round, segment)
        return Neighbours((int(drawn.receivers[rank]),), (0.5,), (int(drawn.sources[rank]),), 0.5)

    def mixing_rows(self, size: int, round: int, segment: int) -> MixingRows:
        self.check_size(size)
        if size == 1:
            return MixingRows(np.array([0, 1]), np.array([0]), np.array([1.0]))
        starts, weights = _starts_and_weights(size)
        return MixingRows(starts, _rounds(self, size).of(round, segment).terms, weights)


class _Drawn(NamedTuple):
    """A derangement, all int64.

    Attributes:
        sources: [size], whom each rank hears from.
        receivers: [size], its inverse: whom each rank sends to.
        terms: [2 * size], each rank and whom it hears from.
    """

    sources: NDArray[np.int64]
    receivers: NDArray[np.int64]
    terms: NDArray[np.int64]


@lru_cache(maxsize=16)
def _rounds(topology: FairRandom, size: int) -> Rounds[_Drawn]:
    table = None if topology.roulette is None else np.array(topology.roulette)

    def draw(draw_keys: Sequence[DrawKey]) -> list[_Drawn]:
        if table is None:
            sources = derangements.uniform(size, topology.seed, draw_keys)
        else:
            sources = derangements.roulette(table, topology.seed, draw_keys)
        ranks = np.arange(size)[None]
        receivers = np.empty_like(sources)
        np.put_along_axis(receivers, sources, ranks, axis=1)
        terms = np.stack([np.broadcast_to(ranks, sources.shape), sources], axis=2).reshape(len(sources), -1)
        return [_Drawn(*drawn) for drawn in zip(sources, receivers, terms, strict=True)]

    return Rounds(draw)


@lru_cache(maxsize=16)
def _starts_and_weights(size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return np.arange(0, 2 * size + 1, 2), np.full(2 * size, 0.5)


def _checked(roulette: object) -> Table:
    """Return a roulette as hashable plain numbers.

    Raises:
        ValueError: it is not one; begins with the field's name.
    """
    try:
        weights = np.array(roulette, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.empty(0)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or len(weights) < 2:
        raise ValueError("roulette must be a square table of numbers, a row for each of two or more ranks")
    if not ((weights >= 0).all() and (weights < 1e300 / len(weights)).all()):
        raise ValueError("roulette has a weight that is negative, not a number, or too large to add")
    if weights.diagonal().any():
        raise ValueError("roulette has a weight on its diagonal, but no rank receives from itself")
    if not _permits_permutation(weights > 0):
        raise ValueError(
            "roulette always leaves a rank without a partner: no permutation of the ranks has only weights above 0"
        )
    return tuple(tuple(map(float, row)) for row in weights)


def _permits_permutation(possible: NDArray[np.bool_]) -> bool:
    """Return whether every row can have a column of its own, by augmenting paths (Kuhn)."""
    row_of: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column in map(int, np.flatnonzero(possible[row])):
            if column not in seen:
                seen.add(column)
                if column not in row_of or place(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(possible)))
