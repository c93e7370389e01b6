"""The dissemination topology: everything reaches everyone in ceil(log2 p) steps, for any number p of ranks.

Source: Daily et al. 2018, sec. 4.3 and 4.4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.api import Neighbours, Topology


def num_dimensions(size: int) -> int:
    """Return ceil(log2 size), exactly, for any size >= 1: the period of these topologies."""
    return (size - 1).bit_length()


@dataclass(frozen=True)
class Dissemination(Topology):
    """A ring whose stride doubles from round to round.

    In round t, with k = t mod ceil(log2 p), rank i sends to (i + 2**k) mod p and hears from (i - 2**k) mod p.

    W = (I + P) / 2, with P a cyclic shift: doubly stochastic for any p. One message
    is sent and one received per round, to and from different ranks where p > 2. The product of ceil(log2 p) rounds is
    positive; it is the exact mean where p is a power of two, and nowhere else. All segments have the same partners.
    """

    differs_by_segment: ClassVar[bool] = False

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return the rank ahead, to send to, and the one behind, to receive from."""
        if size == 1:
            return Neighbours((), (), (), 1.0)
        distance = 1 << round % num_dimensions(size)
        return Neighbours(
            send_to=((rank + distance) % size,),
            send_weights=(0.5,),
            receive_from=((rank - distance) % size,),
            self_weight=0.5,
        )
