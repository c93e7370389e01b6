"""The rules by which a round starts: on whose arrival, and not before what.

Source: eager-SGD (Li et al.), sec. 4.2 for solo and majority; sec. 9 names what lies between and beyond them, which is
the first or the last of m candidates here. P is the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from hocket.api import Array, draws

__all__ = ["Delivery", "Quorum", "QuorumRules", "is_handed"]


class Quorum(StrEnum):
    """Which of a round's candidates starts it."""

    FIRST = "first"
    LAST = "last"


class Delivery(StrEnum):
    """What a rank is handed that was absent from several rounds."""

    NEWEST = "newest"
    SUM = "sum"


@dataclass(frozen=True)
class QuorumRules:
    """When rounds among `size` ranks start; the same on every rank, without a message.

    Attributes:
        size: P.
        candidates: m, how many ranks are drawn for each round, 1 to `size`.
        starts: on which of them it starts.
        staleness: a round waits until no gradient can come in more than so many rounds late; None for no bound.
        seed: of the draws, which are addressed by (seed, round): the same for all segments of a round.
    """

    size: int
    candidates: int
    starts: Quorum
    staleness: int | None = None
    seed: int = 0

    def of_round(self, round: int) -> frozenset[int]:
        """Return the round's candidates."""
        return _drawn(self.size, self.candidates, self.seed, round)

    @property
    def waits_for_all(self) -> bool:
        """Whether no round starts before every rank has come to it: a full collective."""
        return (self.starts is Quorum.LAST and self.candidates == self.size) or self.staleness == 0

    @property
    def expected_active(self) -> float:
        """How many ranks have come when a round starts, on average over orders of arrival, without a bound.

        (P + 1) / (m + 1) for the first of m, m (P + 1) / (m + 1) for the last of m.
        """
        first = (self.size + 1) / (self.candidates + 1)
        return first if self.starts is Quorum.FIRST else self.candidates * first

    def missing(self, round: int, arrived: Array) -> str:
        """Say who has to come before a round may start; see `may_start`."""
        absent = sorted(rank for rank in self.of_round(round) if arrived[rank] <= round)
        told = []
        if absent and (self.starts is Quorum.LAST or len(absent) == self.candidates):
            between = " and " if self.starts is Quorum.LAST else " or "
            told.append(f"rank {between.join(map(str, absent))}")
        if self.staleness is not None:
            late = np.flatnonzero(arrived + self.staleness <= round).tolist()
            told += [f"rank {rank} to round {round - self.staleness}" for rank in late]
        return ", ".join(told)

    def may_start(self, round: int, arrived: Array) -> bool:
        """Return whether a round may start that no rank has started yet.

        Args:
            round: which.
            arrived: in how many rounds each rank has taken part, int64 [P].
        """
        came = arrived[list(self.of_round(round))] > round
        if not (came.any() if self.starts is Quorum.FIRST else came.all()):
            return False
        return self.staleness is None or bool(np.all(arrived + self.staleness > round))


def is_handed(accepted: int, newest: int, missed: Delivery) -> bool:
    """Return whether what the round `accepted` took is in what a rank is handed when `newest` is the newest round."""
    return accepted == newest or (missed is Delivery.SUM and accepted < newest)


@lru_cache(maxsize=1024)
def _drawn(size: int, candidates: int, seed: int, round: int) -> frozenset[int]:
    if candidates == size:
        return frozenset(range(size))
    return frozenset(draws.permutation(size, "eager", seed, round)[:candidates].tolist())
