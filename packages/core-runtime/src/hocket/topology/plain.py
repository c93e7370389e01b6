"""Topologies whose graphs are the same in every run: complete, ring and exponential.

Source: for the ring X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
section 5 (D-PSGD), with weight 1/3 for each of the three. For the exponential graph M. Assran et al., "Stochastic
Gradient Push for Distributed Deep Learning", ICML 2019, section 3 and appendix A (SGP).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from hocket.topology.api import Neighbours, Topology


@dataclass(frozen=True)
class Complete(Topology):
    """The complete graph: W[i, j] = 1/size, in every round and for every segment."""

    differs_by_segment: ClassVar[bool] = False

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return all other ranks, cyclically from the next one, so that no rank is first for all."""
        others = tuple((rank + step) % size for step in range(1, size))
        return Neighbours(
            send_to=others,
            send_weights=(1 / size,) * (size - 1),
            receive_from=tuple(reversed(others)),
            self_weight=1 / size,
        )


@dataclass(frozen=True)
class Ring(Topology):
    """The bidirectional ring, with weights 1/3 for a rank and its two neighbours in every round.

    W[i, i] = W[i, i - 1] = W[i, i + 1] = 1/3, indices modulo n.

    Where the two neighbours are one (n = 2) the weights are 1/2, and alone (n = 1) it is 1: always 1 over the number of
    different ranks. W is symmetric and doubly stochastic. The second largest eigenvalue, 1/3 + 2/3 cos(2 pi / n),
    approaches 1 as n grows: beyond some 16 ranks other topologies mix faster.
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


class Peers(StrEnum):
    """The number of peers that a rank sends to in a round."""

    ONE = "one"
    ALL = "all"


@dataclass(frozen=True)
class Exponential(Topology):
    """The directed exponential graph: rank i's peers are i + 2**h modulo n.

    h is 0 to ceil(log2 n) - 1.

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
