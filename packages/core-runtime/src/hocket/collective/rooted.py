"""What the collectives have in common in which one rank, the root, differs from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hocket.collective.api import Collective

if TYPE_CHECKING:
    from hocket.strategy.exchange import Exchange

__all__ = ["RootedCollective"]


@dataclass(frozen=True)
class RootedCollective(Collective):
    """A collective with a root.

    Attributes:
        root: a rank of the exchange's scope, from 0; null for the rank that leads the segment, which in a group is
            the one that takes part in exchanges over `leaders`.

    Raises:
        ValueError: `root` is below 0.
    """

    slots: ClassVar[frozenset[str]] = frozenset({"gradients", "parameters"})
    carries_messages: ClassVar[bool] = False

    root: int | None = None

    def __post_init__(self) -> None:
        if self.root is not None and self.root < 0:
            raise ValueError(f"root must be 0 or more, not {self.root}")

    def root_of(self, exchange: Exchange, size: int, segment: int) -> int:
        """Return the root's rank, in an exchange among `size` ranks, for segment number `segment`."""
        return self.root_or(exchange.over.leader(size, segment))

    def root_or(self, leader: int) -> int:
        """Return the root's rank where rank `leader` leads the segment."""
        return leader if self.root is None else self.root

    def contribution_scale(self, size: float) -> float:
        return 1.0

    def check_size(self, size: int) -> None:
        if self.root is not None and self.root >= size:
            raise ValueError(
                f"root: {self.root} is no rank of a scope of {size}: give 0 to {size - 1}, or null"
            )
