"""Random peers without fairness, to compare with: everyone hears from one, and some are heard by nobody.

Source: Yeo et al., "Crossover-SGD", section 3.2 ("conventional random network topology"); C. Hu, J. Jiang, Z. Wang,
"Decentralized Federated Learning: A Segmented Gossip Approach", arXiv:1908.07782 (COMBO), for `distinct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hocket.api import Neighbours, Topology, draws
from hocket_crossover import derangements
from hocket_crossover.derangements import DrawKey
from hocket_crossover.rounds import Rounds


@dataclass(frozen=True)
class Unfair(Topology):
    """W[i, i] = W[i, j] = 1/2, where each rank i draws a j of its own among the others.

    Draws are made for each round and segment. Only W's rows sum to 1: the ranks approach each other, but the mean
    drifts, and a rank that many have drawn sends as many copies.

    Attributes:
        seed: the seed of the draws, 0 to 2**64 - 1; the same on every rank.
        distinct: true: each segment of a round comes from a different rank, until a rank has heard from all others, as
            in COMBO: segment s comes from place s mod (n - 1) of a drawn order of the others. This draws n**2 words a
            round.

    Raises:
        ValueError: the seed is not in its range.
    """

    columns_sum_to_one: ClassVar[bool] = False

    seed: int = 0
    distinct: bool = False

    def __post_init__(self) -> None:
        draws.check_seed(self.seed)

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the ranks that have drawn this one, in ascending order, and the one that it has drawn."""
        if size == 1:
            return Neighbours((), (), (), 1.0)
        if self.distinct:
            sources = _orders(self.seed, size).of(round, 0)[segment % (size - 1)]
        else:
            sources = _sources(self.seed, size).of(round, segment)
        receivers = tuple(np.flatnonzero(sources == rank).tolist())
        return Neighbours(receivers, (0.5,) * len(receivers), (int(sources[rank]),), 0.5)


@lru_cache(maxsize=16)
def _sources(seed: int, size: int) -> Rounds[NDArray[np.int64]]:
    """Return draws of the source of each rank, int64 [size]."""

    def draw(draw_keys: Sequence[DrawKey]) -> list[NDArray[np.int64]]:
        # Multiply and shift, as `draws.below`.
        high = derangements.words(size, "unfair", seed, draw_keys) >> np.uint64(32)
        return list(_without_own((high * np.uint64(size - 1) >> np.uint64(32)).astype(np.int64)))

    return Rounds(draw)


@lru_cache(maxsize=16)
def _orders(seed: int, size: int) -> Rounds[NDArray[np.int64]]:
    """Return draws of each rank's order of the others, int64 [size - 1, size].

    A round has one order, which is kept as segment 0's.
    """

    def draw(draw_keys: Sequence[DrawKey]) -> list[NDArray[np.int64]]:
        words = (draws.rows(size - 1, "combo", seed, round, range(size)) for round, _ in draw_keys)
        return [_without_own(np.argsort(of_rank, axis=1, kind="stable").T) for of_rank in words]

    return Rounds(draw)


def _without_own(place: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn places among a rank's others, int64 [..., size], into ranks."""
    return place + (place >= np.arange(place.shape[-1]))
