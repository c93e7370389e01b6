"""The ranks' agreement on batches: whether each adds to a step or ends it.

Between two steps there may be several batches, and only the user's loop knows how many. A rank that leaves one of them
out (`continue`, before a backward) cannot know whether the others end their step with it. So once batches are known to
add up, each rank announces whether a batch adds to its step or ends it, without waiting, before it sends anything of
the step; a rank that has left a batch out waits for the others' announcements. Loops that step with each batch announce
only the first one, and wait for the others' announcements before the second.
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

# Announcements that others have not received yet; more would waste memory.
_MOST_UNDER_WAY = 32


class Windows:
    """The batches between two steps, as the ranks announce them to each other.

    Args:
        peer: all ranks; None where they exchange nothing.

    Attributes:
        in_use: whether batches of some rank add up, so that each is announced; None before the first announcement. The
            ranks compare it at the begin of a pass, too.
        adds_up: whether batches of this rank have added up.
    """

    def __init__(self, peer: Peer | None) -> None:
        self._lane: Lane | None = None if peer is None else peer.lane("batches")
        self.in_use: bool | None = None
        self._announced = True
        self.adds_up = False
        #: Announcements under way: of each batch, the number of ranks on which it adds to a step, or ends one.
        self._under_way: deque[tuple[Request, Array, Array]] = deque()

    def begin_batch(self) -> None:
        """Prepare to announce another batch; before the second, wait for the announcements of the first."""
        self._announced = False
        if self.in_use is None and self._under_way:
            self._learn()

    def announce(self, *, adds: bool = False, steps: bool = False) -> None:
        """Announce, once a batch, whether it adds to a step or ends it; with neither it is left out."""
        if self._announced:
            return
        self._announced = True
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
        """Announce that this rank has left its batch out; return whether others' ends the step; collective.

        Returns:
            None where batches are not known to add up.
        """
        if self._announced:
            return None
        self.announce()
        if self._lane is None:
            return False if self.adds_up else None
        if self.in_use is False:
            return None
        adds, steps = self._last()
        if steps:
            return True
        return False if adds or self.in_use else None

    def _learn(self) -> None:
        """Set `in_use` from the announcements of the last batch."""
        adds, steps = self._last()
        if adds or steps:
            self.in_use = bool(adds)

    def _last(self) -> tuple[int, int]:
        request, _, total = self._under_way[-1]
        request.wait()
        return int(total[0]), int(total[1])

    def close(self) -> None:
        """Wait for the announcements under way, and close the lane; collective."""
        while self._under_way:
            self._under_way.popleft()[0].wait()
        if self._lane is not None:
            self._lane.close()
