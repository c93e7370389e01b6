"""The future of an operation on a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["RANKS_DIVERGED", "Request"]

#: What to look for where ranks meet that do different things; the end of a message.
RANKS_DIVERGED = (
    "did one leave its loop early, skip a step, or begin with another model, other data or another strategy?"
)


class Request(ABC):
    """The future of anything asynchronous."""

    @abstractmethod
    def done(self) -> bool:
        """Advance the transport and return whether the operation has finished. Never blocks.

        Raises:
            TransportError: the operation failed.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the operation has finished, without burning a core, and return `result`.

        Args:
            timeout_s: seconds to wait at most; the peer's own `timeout_s` where None.

        Raises:
            ExchangeTimeoutError: not finished in time; names this rank, the lane and the ranks it waited for.
            TransportError: the operation failed.
        """

    @property
    def result(self) -> Any:
        """What the operation gave, once it is done; None for plain messages."""
        return None

    def order(self) -> None:
        """Have what the current stream does next come after the operation; by default this waits for it.

        A device's request only makes the stream wait, and returns at once.
        """
        self.wait()

    def withdraw(self) -> None:
        """Give up a receive for which no message has come; its buffer is the caller's again. Never blocks.

        A message that comes all the same is lost, or is met by a later receive for the same round.

        Raises:
            TypeError: this is no receive.
        """
        raise TypeError(f"{type(self).__name__}: only a receive can be withdrawn")
