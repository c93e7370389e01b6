"""What advances the exchanges that are under way while nobody waits for them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hocket.transport.peer import Request

__all__ = ["ProgressEngine"]


class ProgressEngine(ABC):
    """Advances requests between their start and somebody's wait."""

    @abstractmethod
    def watch(self, request: Request) -> None:
        """Advance `request` from now on, until it is done."""

    @abstractmethod
    def advance(self) -> None:
        """A moment at which the training thread can spare microseconds: a gradient has arrived.

        Raises:
            TransportError: an exchange failed.
        """
