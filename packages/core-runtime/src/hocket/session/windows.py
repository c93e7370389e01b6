"""What the ranks' batches do with a step: add to it, or end it.

Between two steps there may be several batches, and only the user's loop knows how many. A rank that leaves one of them
out (`continue`, before a backward) cannot know whether the others end their step with it. So once batches are known to
add up, each rank tells of each batch what it does with it, without waiting, before it sends anything of its step; who
has left a batch out waits for what the others tell. Loops that step with each batch tell this of their first one only,
and wait for the others' word before their second.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hocket.arrays import Array

if TYPE_CHECKING:
    from hocket.transport.lane import Lane
    from hocket.transport.peer import Peer
    from hocket.transport.request import Request

__all__ = ["Windows"]

# What the others have not heard yet; more would be memory for nothing.
_MOST_UNDER_WAY = 32


class Windows:
    """The batches between two steps, as the ranks tell each other.

    Args:
        peer: all ranks; None where they exchange nothing, and each goes its own way.

    Attributes:
        in_use: whether batches of some rank add up, so that each is told; None while nobody has told of one. The ranks
            compare it at the begin of a pass, too.
        adds_up: whether batches of this rank have added up.
    """

    def __init__(self, peer: Peer | None) -> None:
        self._lane: Lane | None = None if peer is None else peer.lane("batches")
        self.in_use: bool | None = None
        self._told = True
        self.adds_up = False
        #: Of each batch that not all have heard of: on how many ranks it adds to a step, and on how many it ends one.
        self._under_way: deque[tuple[Request, Array, Array]] = deque()

    def begin_batch(self) -> None:
        """Expect to tell what becomes of another batch; waits, before the second, for what became of the first."""
        self._told = False
        if self.in_use is None and self._under_way:
            self._learn()

    def tell(self, *, adds: bool = False, steps: bool = False) -> None:
        """Tell the others, once a batch, whether it adds to a step or ends it; with neither it is left out."""
        if self._told:
            return
        self._told = True
        self.adds_up = self.adds_up or adds
        if self._lane is None:
            return
        if self.in_use is False:
            return
        while len(self._under_way) > _MOST_UNDER_WAY or (self._under_way and self._under_way[0][0].done()):
            self._under_way.popleft()[0].wait()
        own, total = np.array([adds, steps], dtype=np.int64), np.zeros(2, dtype=np.int64)
        self._under_way.append((self._lane.iallreduce(own, total), own, total))

    def leave_out(self) -> bool | None:
        """Tell the others that this rank has left its batch out, and return whether theirs ends the step; collective.

        Returns:
            None where nobody knows of batches that add up.
        """
        if self._told:
            return None
        self.tell()
        if self._lane is None:
            return False if self.adds_up else None
        if self.in_use is False:
            return None
        adds, steps = self._last()
        if steps:
            return True
        return False if adds or self.in_use else None

    def _learn(self) -> None:
        """Know from what was told of the last batch whether batches add up."""
        adds, steps = self._last()
        if adds or steps:
            self.in_use = bool(adds)

    def _last(self) -> tuple[int, int]:
        request, _, total = self._under_way[-1]
        request.wait()
        return int(total[0]), int(total[1])

    def close(self) -> None:
        """Wait for what was told, and give the lane back; collective."""
        while self._under_way:
            self._under_way.popleft()[0].wait()
        if self._lane is not None:
            self._lane.close()
