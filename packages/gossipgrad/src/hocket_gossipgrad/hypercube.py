"""The hypercube: pairs average along one dimension after the other. Powers of two only.

Source: Daily et al. 2018, sec. 4.3 and 4.4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.api import Neighbours, Topology
from hocket_gossipgrad.dissemination import num_dimensions


@dataclass(frozen=True)
class Hypercube(Topology):
    """Pairs of ranks along the dimensions of a hypercube, one dimension in each round.

    In round t, with k = t mod log2 p, ranks i and i xor 2**k average.

    W = (I + P) / 2, with P an exchange of pairs: symmetric and doubly stochastic. The product of log2 p rounds is
    the exact mean. All segments have the same partners.
    """

    differs_by_segment: ClassVar[bool] = False

    def check_size(self, size: int) -> None:
        """Refuse all but powers of two, as other ranks would have partners beyond the last one.

        Raises:
            ValueError: names the size, the nearest possible ones and the topology to use in its place.
        """
        if size & (size - 1):
            below = 1 << size.bit_length() - 1
            raise ValueError(
                f"hypercube needs a power of two, not {size} ranks: use {below} or {2 * below} ranks, or "
                "gossipgrad.dissemination, which takes any number"
            )

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the one partner of this round.

        Raises:
            ValueError: the size is no power of two.
        """
        self.check_size(size)
        if size == 1:
            return Neighbours((), (), (), 1.0)
        partner = (rank ^ 1 << round % num_dimensions(size),)
        return Neighbours(send_to=partner, send_weights=(0.5,), receive_from=partner, self_weight=0.5)
