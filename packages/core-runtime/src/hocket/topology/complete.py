"""Everyone hears from everyone, so that one round gives every rank the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.topology.api import Neighbours, Topology

__all__ = ["Complete"]


@dataclass(frozen=True)
class Complete(Topology):
    """The complete graph: W[i, j] = 1/size, in every round and for every segment."""

    differs_by_segment: ClassVar[bool] = False

    def neighbours(self, rank: int, size: int, round: int, segment: int) -> Neighbours:
        """Return all other ranks, cyclically from the next one, so that nobody is everyone's first."""
        others = tuple((rank + step) % size for step in range(1, size))
        return Neighbours(
            send_to=others,
            send_weights=(1 / size,) * (size - 1),
            receive_from=tuple(reversed(others)),
            self_weight=1 / size,
        )
