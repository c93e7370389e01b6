"""Among whom an exchange takes place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.transport.peer import Peer

__all__ = ["Scope", "World"]


class Scope(ABC):
    """Ranks among which an exchange takes place; a frozen dataclass whose fields are its configuration."""

    @abstractmethod
    def ranks(self, rank: int, size: int) -> Sequence[int]:
        """Return the ranks of the exchange that concerns `rank`, in order, perhaps without `rank` itself.

        Pure, so that `plan` can ask it for any number of ranks.

        Raises:
            ValueError: the scope is not defined for `size` ranks; says for which it is.
        """

    def peer_for(self, peer: Peer) -> Peer | None:
        """Return this rank's endpoint in the scope, or None if it takes no part; collective.

        Args:
            peer: the endpoint among all ranks.
        """
        ranks = self.ranks(peer.rank, peer.size)
        return peer if list(ranks) == list(range(peer.size)) else peer.group(ranks)


@dataclass(frozen=True)
class World(Scope):
    """All ranks."""

    def ranks(self, rank: int, size: int) -> Sequence[int]:
        """Return 0, 1, ..., size - 1."""
        return range(size)
