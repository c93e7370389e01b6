"""Exchanges of training samples, before the forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hocket.configured import Configured
from hocket.plain import Batch, Tree

if TYPE_CHECKING:
    from hocket.transport.peer import Peer


class SampleStream(ABC):
    """A stream of batches to train on, with a position that a checkpoint can keep.

    Each iteration is an epoch, which all ranks begin together and leave at its end, or after the same number of
    batches. A batch is used when the next one is requested, when the next epoch begins, or when the stream is closed;
    it can be sent on then. So a training loop reads no batch ahead.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch, and yield its batches as the wrapped loader does; their tensors are the caller's own."""

    def __len__(self) -> int:
        """Return this rank's number of batches in the epoch that has begun last.

        Raises:
            TypeError: it is not known before the epoch's end.
        """
        raise TypeError(f"{type(self).__name__} does not know how many batches an epoch has")

    @abstractmethod
    def state_dict(self) -> Tree:
        """Return the state for a resumed run, tensors and plain values by name.

        Saved after an epoch's last batch, it is that epoch's end: a stream that is resumed there yields no batch at
        first.
        """

    @abstractmethod
    def load_state_dict(self, state: Tree) -> None:
        """Continue from a result of `state_dict` on this rank, with a new loader and before the first epoch."""

    def close(self) -> None:  # noqa: B027 (nothing to give back where nothing is sent)
        """Receive samples that others have sent, and close the stream; collective."""


class SampleShuffle(Configured, ABC):
    """A movement of samples between ranks; a frozen dataclass whose fields are its configuration."""

    @abstractmethod
    def wrap(self, loader: Iterable[Batch], peer: Peer, epoch: int = 0) -> SampleStream:
        """Return the loader's batches, exchanged among ranks; collective.

        Args:
            loader: any iterable of batches, of this rank's share.
            peer: this rank's endpoint among the ranks that exchange samples.
            epoch: the first one's number; more than 0 where earlier epochs had other loaders, whose streams are closed.
        """
