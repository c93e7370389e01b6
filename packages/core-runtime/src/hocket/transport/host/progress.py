"""What a process owes the other ranks of its host, and does while it waits for something else."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Advancing", "HostProgress"]


class Advancing(Protocol):
    """What other ranks cannot end without this one."""

    def advance(self) -> bool:
        """Do what can be done; return whether the others need nothing more."""


class HostProgress:
    """The exchanges of this process that are not done: whoever waits for one advances them all.

    Other ranks need this rank's share of each, and may wait for them in another order.
    """

    def __init__(self) -> None:
        self._unfinished: list[Advancing] = []

    def add(self, exchange: Advancing) -> None:
        """Begin an exchange."""
        if not exchange.advance():
            self._unfinished.append(exchange)

    @property
    def busy(self) -> bool:
        """Whether anything is not done."""
        return bool(self._unfinished)

    def advance(self) -> None:
        """Look once at everything that is not done."""
        if self._unfinished:
            self._unfinished = [exchange for exchange in self._unfinished if not exchange.advance()]
