"""Progress from the training thread: outstanding requests are looked at whenever a gradient arrives.

Source: GossipGraD (Daily et al. 2018), sec. 5.1, which calls MPI_Testall between layers.
"""

from __future__ import annotations

from hocket.progress.api import ProgressEngine
from hocket.transport.peer import Request

__all__ = ["InlineProgress"]


class InlineProgress(ProgressEngine):
    """The requests that are under way on this rank."""

    def __init__(self) -> None:
        self._outstanding: list[Request] = []

    def watch(self, request: Request) -> None:
        self._outstanding.append(request)

    def advance(self) -> None:
        if self._outstanding:
            self._outstanding = [request for request in self._outstanding if not request.done()]
