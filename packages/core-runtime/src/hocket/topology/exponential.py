"""Everyone sends to ranks at distances of powers of two (SGP).

Source: M. Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, section 3 and
appendix A: the directed exponential graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from hocket.topology.api import Neighbours, Topology

__all__ = ["Exponential", "Peers"]


class Peers(StrEnum):
    """To how many of its peers a rank sends in a round."""

    ONE = "one"
    ALL = "all"


@dataclass(frozen=True)
class Exponential(Topology):
    """The directed exponential graph: rank i's peers are i + 2**h modulo n, for h = 0 to ceil(log2 n) - 1.

    With `peers: one`, round t sends to the peer of h = t mod ceil(log2 n), so W = (I + P) / 2 with P a cyclic
    shift. For n a power of two the product over ceil(log2 n) rounds is the exact mean. With `peers: all`, every
    round sends to all of them, each with weight 1 / (1 + ceil(log2 n)).

    W is doubly stochastic for every n. All segments have the same peers.

    Attributes:
        peers: one peer per round, as in SGP, or all.
    """

    differs_by_segment: ClassVar[bool] = False

    peers: Peers = Peers.ONE

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the peers ahead of `rank`, to send to, and those behind it, to receive from."""
        num_hops = (size - 1).bit_length()  # ceil(log2 size), exactly
        if num_hops == 0:
            return Neighbours((), (), (), 1.0)
        hops = [round % num_hops] if self.peers is Peers.ONE else range(num_hops)
        weight = 1 / (len(hops) + 1)
        return Neighbours(
            send_to=tuple((rank + (1 << hop)) % size for hop in hops),
            send_weights=(weight,) * len(hops),
            receive_from=tuple((rank - (1 << hop)) % size for hop in hops),
            self_weight=weight,
        )
