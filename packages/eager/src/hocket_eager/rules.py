"""The rules by which a round starts: the ranks whose arrival starts it, and the conditions that it waits for.

Source: eager-SGD (Li et al.), sec. 4.2 for solo and majority; sec. 9 names rules between and beyond them, here the
first or the last of m candidates. P is the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from hocket.api import Array, draws


class Quorum(StrEnum):
    """The candidate of a round that starts it."""

    FIRST = "first"
    LAST = "last"


class Delivery(StrEnum):
    """The result that a rank is handed after an absence of several rounds."""

    NEWEST = "newest"
    SUM = "sum"


@dataclass(frozen=True)
class QuorumRules:
    """The rules by which rounds among `size` ranks start, the same on every rank without a message.

    Attributes:
        size: P.
        candidates: m, the number of ranks drawn for each round, 1 to `size`.
        starts: the candidate whose arrival starts it.
        staleness: the most rounds by which a gradient may be late, for which a round waits; None for no bound.
        seed: the draws' seed; draws are addressed by (seed, round), the same for all segments of a round.
    """

    size: int
    candidates: int
    starts: Quorum
    staleness: int | None = None
    seed: int = 0

    def of_round(self, round: int) -> frozenset[int]:
        """Return the round's candidates."""
        return _drawn(self.size, self.candidates, self.seed, round)

    def missing(self, round: int, arrived: Array) -> str:
        """Describe the ranks that must come before a round may start; see `may_start`."""
        absent = sorted(rank for rank in self.of_round(round) if arrived[rank] <= round)
        missing = []
        if absent and (self.starts is Quorum.LAST or len(absent) == self.candidates):
            between = " and " if self.starts is Quorum.LAST else " or "
            missing.append(f"rank {between.join(map(str, absent))}")
        if self.staleness is not None:
            late = np.flatnonzero(arrived + self.staleness <= round).tolist()
            missing += [f"rank {rank} to round {round - self.staleness}" for rank in late]
        return ", ".join(missing)

    def may_start(self, round: int, arrived: Array) -> bool:
        """Return whether a round may start that no rank has started yet.

        Args:
            round: its number.
            arrived: the number of rounds in which each rank has taken part, int64 [P].
        """
        came = arrived[list(self.of_round(round))] > round
        if not (came.any() if self.starts is Quorum.FIRST else came.all()):
            return False
        return self.staleness is None or bool(np.all(arrived + self.staleness > round))


def is_handed(accepted: int, newest: int, missed: Delivery) -> bool:
    """Return whether a rank that is handed round `newest` gets what round `accepted` took."""
    return accepted == newest or (missed is Delivery.SUM and accepted < newest)


@lru_cache(maxsize=1024)
def _drawn(size: int, candidates: int, seed: int, round: int) -> frozenset[int]:
    if candidates == size:
        return frozenset(range(size))
    return frozenset(draws.permutation(size, "eager", seed, round)[:candidates].tolist())
