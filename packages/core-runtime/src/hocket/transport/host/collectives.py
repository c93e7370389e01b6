"""A lane's collectives over shared memory, where it is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from hocket.arrays import Array
from hocket.transport.host.exchange import HostExchange, HostLane
from hocket.transport.host.memory import SMALLEST_BYTES, Shared, find_shared
from hocket.transport.host.mixing import HostMixer
from hocket.transport.host.sharing import sum_share
from hocket.transport.reduction import TreeSum

__all__ = ["HostCollectives"]

# A lane remembers where so many arrays lie in shared memory.
_REMEMBERED = 64


class HostCollectives:
    """What a lane does over shared memory; each method returns None where it does not, on all ranks alike.

    Args:
        lane: its exchanges.
    """

    def __init__(self, lane: HostLane) -> None:
        self._lane = lane
        self._everyone = range(len(lane.world_ranks))
        self._sums: dict[np.dtype[np.generic], TreeSum] = {}
        self._shared: dict[tuple[int, int, str], tuple[Array, Shared | None]] = {}

    def allreduce(self, send: Array, receive: Array) -> HostExchange | None:
        """Put the sum of all ranks' `send` into everyone's `receive`."""
        sends, receives = self._find(send), self._find(receive)
        if sends is None or receives is None:
            return None
        total = self._sums.get(send.dtype)
        if total is None:
            total = self._sums[send.dtype] = TreeSum(len(self._everyone), send.dtype)
        return self._lane.start(
            f"allreduce of {sends.what} into {receives.what}",
            partial(sum_share, self._lane.rank, total, sends.views, receives.views),
            touched=self._everyone,
            touching=self._everyone,
        )

    def broadcast(self, data: Array, root: int) -> HostExchange | None:
        """Copy `data` of rank `root` into everyone's."""
        shared = self._find(data)
        if shared is None:
            return None
        own, given = shared.views[self._lane.rank], shared.views[root]
        is_root = self._lane.rank == root

        def copy() -> tuple[int, ...]:
            if not is_root:
                own[...] = given
            return ()

        return self._lane.start(
            f"broadcast of {shared.what} from rank {root}",
            copy,
            touched=[root],
            touching=self._everyone if is_root else [],
        )

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> HostMixer | None:
        """Prepare weighted sums of the first of each pair into the second."""
        shared = []
        for data, out in places:
            values, outs = self._find(data), self._find(out)
            if values is None or outs is None or data.dtype.char not in "fd":
                return None
            shared.append((values, outs))
        return HostMixer(self._lane, shared)

    def _find(self, array: Array) -> Shared | None:
        """Return everybody's arrays, or None if they are too small or not in shared memory."""
        if array.nbytes < SMALLEST_BYTES:
            return None
        key = (array.__array_interface__["data"][0], array.nbytes, array.dtype.str)
        if key not in self._shared:
            if len(self._shared) >= _REMEMBERED:
                self._shared.clear()
            ranks: Sequence[int] = self._lane.world_ranks
            # With the array itself, so that its address stays its own.
            self._shared[key] = (array, find_shared(array, ranks, ranks[self._lane.rank]))
        return self._shared[key][1]
