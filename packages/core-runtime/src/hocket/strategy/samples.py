"""What crosses the wire before the forward pass: training samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.transport.peer import Peer

__all__ = ["SampleExchange", "SampleStream"]


class SampleStream(ABC):
    """Batches to train on, with a position that a checkpoint can keep."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yield batches as the wrapped loader does."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, tensors and plain values by name."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank."""


class SampleExchange(ABC):
    """How samples move between ranks; a frozen dataclass whose fields are its configuration."""

    @abstractmethod
    def wrap(self, loader: Any, peer: Peer) -> SampleStream:
        """Return the batches of `loader`, any iterable of batches, exchanged among ranks."""
