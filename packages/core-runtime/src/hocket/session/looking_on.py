"""What a loop over one session's batches means for who looks on: other sessions, and models that are only evaluated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import nn

if TYPE_CHECKING:
    from hocket.session.session import Session

__all__ = ["Onlookers", "only_evaluates"]


def only_evaluates(model: nn.Module) -> bool:
    """Return whether whoever calls the model now seems to evaluate it: in eval mode, or without gradients."""
    return not (model.training and torch.is_grad_enabled())


class Onlookers:
    """The sessions that one rank has attached and not closed.

    A second one (a GAN's other half) that steps within the first one's loop steps with the same batches, and so they
    count the same in both: nothing where they are repeated.
    """

    def __init__(self) -> None:
        self._sessions: WeakSet[Session] = WeakSet()

    def add(self, session: Session) -> None:
        """Take note of a session; it belongs to the thread that calls, as virtual ranks do."""
        session.thread = threading.get_ident()
        self._sessions.add(session)

    def remove(self, session: Session) -> None:
        """Forget it."""
        self._sessions.discard(session)

    def of(self, session: Session) -> Iterator[Session]:
        """Yield the rank's other sessions that have no loop of their own."""
        if len(self._sessions) < 2:
            return
        for other in list(self._sessions):
            if other is not session and other.thread == session.thread and not other.epochs.under_way:
                yield other
