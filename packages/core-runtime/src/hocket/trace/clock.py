"""One clock for all ranks: the offset of each rank's clock from that of rank 0.

Source: D. Mills, "Internet time synchronization: the network time protocol" (1991): of several round trips, the
shortest one bounds the offset best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.transport.lane import Lane

_ROUND_TRIPS = 10


@dataclass(frozen=True)
class ClockReading:
    """A comparison of this rank's clock with that of rank 0.

    Attributes:
        local_s: the time of the comparison on this rank's clock, in seconds.
        offset_s: seconds to add to it for the clock of rank 0; exact to half of the shortest round trip.
    """

    local_s: float
    offset_s: float


def compare(lane: Lane, now: Callable[[], float]) -> ClockReading:
    """Compare the clocks of all ranks with that of rank 0; collective.

    An offset within the measurement's error is 0: ranks of one host read the same clock (CLOCK_MONOTONIC, which
    `time.perf_counter` reads on Linux, is the host's), and so do virtual ranks.

    Args:
        lane: a lane over all ranks, with nothing under way.
        now: returns the time of this rank's clock, in seconds.
    """
    offset = np.empty(1)
    if lane.rank == 0:
        for other in range(1, lane.size):
            offset[0] = _offset(lane, now, other)
            lane.isend(offset, other, _ROUND_TRIPS).wait()
        return ClockReading(now(), 0.0)
    for number in range(_ROUND_TRIPS):
        lane.irecv(offset, 0, number).wait()
        lane.isend(np.array([now()]), 0, number).wait()
    lane.irecv(offset, 0, _ROUND_TRIPS).wait()
    return ClockReading(now(), float(offset[0]))


def _offset(lane: Lane, now: Callable[[], float], other: int) -> float:
    """Return the seconds by which rank 0's clock, which is this one's, is ahead of the other rank's."""
    theirs = np.empty(1)
    shortest_s, offset_s = float("inf"), 0.0
    for number in range(_ROUND_TRIPS):
        start_s = now()
        lane.isend(theirs, other, number).wait()
        lane.irecv(theirs, other, number).wait()
        end_s = now()
        if end_s - start_s < shortest_s:
            shortest_s = end_s - start_s
            offset_s = (start_s + end_s) / 2 - float(theirs[0])
    return 0.0 if abs(offset_s) <= shortest_s / 2 else offset_s


def to_rank_0(local_s: Sequence[float], readings: Sequence[ClockReading]) -> list[float]:
    """Translate times of a rank's clock into times of rank 0's, both in seconds.

    The offset is assumed to change at a constant rate between two readings, and to be constant outside of them.
    """
    if not readings:
        return list(local_s)  # the rank was ended before the first one
    times = np.asarray(local_s, dtype=np.float64)
    offsets = np.interp(times, [r.local_s for r in readings], [r.offset_s for r in readings])
    translated: list[float] = (times + offsets).tolist()
    return translated
