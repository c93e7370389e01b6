"""Everyone averages with both neighbours on a ring (D-PSGD).

Source: X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
section 5: a ring with weight 1/3 for each of the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.topology.api import Neighbours, Topology

__all__ = ["Ring"]


@dataclass(frozen=True)
class Ring(Topology):
    """The bidirectional ring: W[i, i] = W[i, i - 1] = W[i, i + 1] = 1/3, indices modulo n, in every round.

    Where the two neighbours are one (n = 2) the weights are 1/2, and alone (n = 1) it is 1: always 1 over the
    number of different ranks that meet. W is symmetric and doubly stochastic. The second largest eigenvalue,
    1/3 + 2/3 cos(2 pi / n), comes close to 1 as n grows: beyond some 16 ranks others mix faster.
    """

    differs_by_segment: ClassVar[bool] = False

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the next and the previous rank, the next one first."""
        # A dictionary for its keys: one of each, in order.
        others = tuple(dict.fromkeys(((rank + 1) % size, (rank - 1) % size)))
        others = tuple(other for other in others if other != rank)
        weight = 1 / (len(others) + 1)
        return Neighbours(
            send_to=others,
            send_weights=(weight,) * len(others),
            receive_from=tuple(reversed(others)),
            self_weight=weight,
        )
