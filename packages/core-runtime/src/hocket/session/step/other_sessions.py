"""The effects of a loop over one session's batches on others: other sessions, and models under evaluation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakSet

import torch
from torch import nn

from hocket.session.data.epochs import Epochs


def only_evaluates(model: nn.Module) -> bool:
    """Return whether the model seems to be evaluated now: in eval mode, or without gradients."""
    return not (model.training and torch.is_grad_enabled())


class OtherSession(Protocol):
    """A session that may step within another one's loop."""

    thread: int
    epochs: Epochs
    used_backward: int

    def follow_batch(self, weight: float) -> None:
        """Note a batch from another session's loop, and its weight there."""

    def follow_end(self) -> None:
        """Note that the other session's loop is over."""


class OtherSessions:
    """The sessions that one rank has attached and not closed.

    A second one (a GAN's other half) that steps within the first one's loop steps with the same batches, and so they
    count the same in both: nothing where they are repeated.
    """

    def __init__(self) -> None:
        self._sessions: WeakSet[OtherSession] = WeakSet()

    def add(self, session: OtherSession) -> None:
        """Add a session; it belongs to the calling thread, as virtual ranks do."""
        session.thread = threading.get_ident()
        self._sessions.add(session)

    def remove(self, session: OtherSession) -> None:
        """Remove a session."""
        self._sessions.discard(session)

    def of(self, session: OtherSession) -> Iterator[OtherSession]:
        """Yield the rank's other sessions that have no loop of their own."""
        for other in self._others(session):
            if not other.epochs.under_way:
                yield other

    def use(self, session: OtherSession, backward: int) -> bool:
        """Return whether one of the rank's other sessions has stepped with the same backward."""
        return backward >= 0 and any(other.used_backward == backward for other in self._others(session))

    def _others(self, session: OtherSession) -> Iterator[OtherSession]:
        if len(self._sessions) < 2:
            return
        for other in list(self._sessions):
            if other is not session and other.thread == session.thread:
                yield other
