"""One clock for all ranks: measures how far each rank's clock is behind that of rank 0.

Source: D. Mills, "Internet time synchronization: the network time protocol" (1991): of several round trips, the
shortest one bounds the offset best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.transport.lane import Lane

__all__ = ["ClockReading", "compare", "to_rank_0"]

_ROUND_TRIPS = 10


@dataclass(frozen=True)
class ClockReading:
    """A comparison of this rank's clock with that of rank 0.

    Attributes:
        local_s: when, on this rank's clock.
        offset_s: what must be added to it to give the clock of rank 0; exact to half of the shortest round trip.
    """

    local_s: float
    offset_s: float


def compare(lane: Lane, now: Callable[[], float]) -> ClockReading:
    """Compare the clocks of all ranks with that of rank 0; collective.

    An offset that cannot be told from 0 is 0: ranks of one host read the same clock (CLOCK_MONOTONIC, which
    `time.perf_counter` reads on Linux, is the host's), and the virtual clock is one.

    Args:
        lane: over all ranks, with nothing under way.
        now: this rank's clock, in seconds.
    """
    told = np.empty(1)
    if lane.rank == 0:
        for other in range(1, lane.size):
            told[0] = _offset(lane, now, other)
            lane.isend(told, other, _ROUND_TRIPS).wait()
        return ClockReading(now(), 0.0)
    for number in range(_ROUND_TRIPS):
        lane.irecv(told, 0, number).wait()
        lane.isend(np.array([now()]), 0, number).wait()
    lane.irecv(told, 0, _ROUND_TRIPS).wait()
    return ClockReading(now(), float(told[0]))


def _offset(lane: Lane, now: Callable[[], float], other: int) -> float:
    """Return by how much rank 0's clock, which is this one's, is ahead of the other rank's."""
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
    """Translate times of a rank's clock into times of rank 0's.

    Between two readings the offset is taken to change at a constant rate, outside of them to stay what it was.
    """
    if not readings:
        return list(local_s)  # the rank was ended before the first one
    times = np.asarray(local_s, dtype=np.float64)
    offsets = np.interp(times, [r.local_s for r in readings], [r.offset_s for r in readings])
    translated: list[float] = (times + offsets).tolist()
    return translated
