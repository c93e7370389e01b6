"""A lane's collectives over shared memory, where they are faster than messages."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hocket.arrays import Array, MixingRows
from hocket.transport.host.marks import MARK_BYTES, Marks
from hocket.transport.host.memory import SMALLEST_BYTES, Shared, find_shared
from hocket.transport.host.operation import HostLane, HostOperation
from hocket.transport.host.peer import ProcessLane
from hocket.transport.lane import Mixer
from hocket.transport.reduction import TreeSum
from hocket.transport.request import Request

if TYPE_CHECKING:
    from hocket.kernels.mixing import JoinedRows

_CACHE_LINE_BYTES = 64

# A lane remembers where so many arrays lie in shared memory.
_REMEMBERED = 64


class HostCollectives:
    """The collectives of a lane over shared memory; a method returns None, on all ranks alike, to use messages.

    Args:
        lane: its exchanges.
    """

    def __init__(self, lane: HostLane) -> None:
        self._lane = lane
        self._everyone = range(len(lane.world_ranks))
        self._sums: dict[np.dtype[np.generic], TreeSum] = {}
        self._shared: dict[tuple[int, int, str], tuple[Array, Shared | None]] = {}

    def allreduce(self, send: Array, receive: Array) -> HostOperation | None:
        """Put the sum of all ranks' `send` into every rank's `receive`."""
        sends, receives = self._find(send), self._find(receive)
        if sends is None or receives is None:
            return None
        total = self._sums.get(send.dtype)
        if total is None:
            total = self._sums[send.dtype] = TreeSum(len(self._everyone), send.dtype)
        return self._lane.start(
            "allreduce",
            f"allreduce of {sends.what} into {receives.what}",
            partial(_sum_share, self._lane.rank, total, sends.views, receives.views),
            touched=self._everyone,
            touching=self._everyone,
        )

    def broadcast(self, data: Array, root: int) -> HostOperation | None:
        """Copy `data` of rank `root` into every rank's."""
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
            f"broadcast from rank {self._lane.world_ranks[root]}",
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
        """Return all ranks' arrays, or None if they are too small or not in shared memory."""
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


def open_host_collectives(lane: ProcessLane, capacity_bytes: int) -> HostCollectives | None:
    """Return a lane's collectives over shared memory; None, on all ranks alike, to use messages.

    Args:
        lane: just opened, by all ranks.
        capacity_bytes: as of `Peer.lane`.
    """
    marks = lane.peer.memory.share(MARK_BYTES) if capacity_bytes >= SMALLEST_BYTES else None
    return None if marks is None else HostCollectives(HostLane(lane, Marks(lane.rank, marks)))


class HostMixer(Mixer):
    """Weighted sums of the same places: each rank computes a share of all sums, and writes it in place.

    Args:
        lane: its exchanges.
        places: of each pair every rank's vector, [n] floats of one dtype, and the place of its sum: the same memory or
            other.
    """

    def __init__(self, lane: HostLane, places: Sequence[tuple[Shared, Shared]]) -> None:
        from hocket.kernels import Mix

        self._lane = lane
        arrays = [values.views[lane.rank] for values, _ in places]
        self._mix = Mix(
            lane.rank,
            [values.addresses for values, _ in places],
            [outs.addresses for _, outs in places],
            [array.size for array in arrays],
            arrays[0].dtype,
        )
        self._places = places  # whose memory lives as long as this
        self._what = "; ".join(f"{values.what} into {outs.what}" for values, outs in places)

    def start(self, rows: Sequence[MixingRows]) -> Request[tuple[int, ...]]:
        joined = self._mix.join(rows)
        connected = self._mix.connected(joined)
        graphs = 0
        for numbers in joined:
            graphs = zlib.crc32(numbers.data, graphs)
        return self._lane.start(
            "mixing",
            f"mix of {self._what} over graphs {graphs:08x}",
            partial(self._write, joined),
            touched=connected,
            touching=connected,
        )

    def _write(self, joined: JoinedRows) -> list[int]:
        # By way of `self`, which keeps the memory: the exchange is carried out also where its caller has dropped it.
        return self._mix(joined)


def _share_of(array: Array, position: int, size: int) -> slice:
    """Return share number `position` of `size` shares of `array`, in whole cache lines."""
    lines = -(-array.nbytes // (size * _CACHE_LINE_BYTES))
    numel = lines * _CACHE_LINE_BYTES // array.itemsize
    return slice(min(position * numel, array.size), min((position + 1) * numel, array.size))


def _sum_share(rank: int, total: TreeSum, sends: Sequence[Array], receives: Sequence[Array]) -> list[int]:
    """Write the sum of all `sends` into all `receives`, for the elements of this rank's share.

    Args:
        rank: this rank.
        total: a sum for this number of arrays and this dtype.
        sends: every rank's, by rank, [n].
        receives: every rank's, by rank, [n]; each its `send`, or other memory.
    """
    own = _share_of(sends[0], rank, len(sends))
    total([send[own] for send in sends], *(receive[own] for receive in receives))
    return []
