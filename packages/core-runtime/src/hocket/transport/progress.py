"""What waits of this rank advance besides the operation that they wait for."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Advancing", "Progress"]


class Advancing(Protocol):
    """What other ranks cannot end without this one."""

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether the others need nothing more."""


class Progress:
    """Advances nothing besides: exchanges that are under way at once are begun at once."""

    def owe(self, exchanges: Advancing) -> bool:
        """Advance in every wait of this process what begins exchanges in turn, until the other ranks need no more.

        Returns:
            Whether it will be advanced: only where exchanges that are under way at once share the network between
            hosts, and are all late. Elsewhere the caller begins them all.
        """
        return False
