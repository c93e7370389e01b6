"""The notices that one rank sends another, of which only the newest counts."""

from __future__ import annotations

import numpy as np

from hocket.transport.lane import Lane
from hocket.transport.request import Request

__all__ = ["Notices"]


class Notices:
    """A stream of round numbers from one rank, with a receive always posted for the next.

    As a stream knows no rounds, no receive is left behind by a round that did not need it, and a notice of a finished
    round is seen for what it is.

    Attributes:
        newest: the round of the last notice; -1 before the first.
    """

    def __init__(self, lane: Lane, source: int, tag: int) -> None:
        """Post the first receive.

        Args:
            lane: where they come.
            source: who sends them.
            tag: the number under which they are sent, in all rounds.
        """
        self._source = source
        self.newest = -1
        self._lane = lane
        self._tag = tag
        self._buffer = np.zeros(1, np.int64)
        self._receive = self._post()

    def look(self) -> bool:
        """Take in the next notice and return whether there was one."""
        if not self._receive.done():
            return False
        self.newest = int(self._buffer[0])
        self._receive = self._post()
        return True

    def withdraw(self) -> None:
        """Give the posted receive up."""
        self._receive.withdraw()

    def _post(self) -> Request:
        return self._lane.irecv(self._buffer, self._source, self._tag)
