"""Where the spans of all ranks go in a trace: at which time of one clock, and in which row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.observation.clock import to_rank_0
from hocket.observation.recorded import Recording, Span
from hocket.observation.recording import OPERATIONS

__all__ = ["Placed", "place", "rows_of"]

# Long enough for an arrow to end within.
_SHORTEST_OPERATION_NS = 2


@dataclass(frozen=True, slots=True)
class Placed:
    """A span on the common clock.

    Attributes:
        span: as it was recorded.
        rank: whose.
        start_ns, end_ns: since the trace's first moment.
    """

    span: Span
    rank: int
    start_ns: int
    end_ns: int


def place(recordings: Sequence[Recording]) -> dict[int, list[Placed]]:
    """Translate all ranks' times into nanoseconds of one clock, from the first one on."""
    times = {}
    for recording in recordings:
        starts = to_rank_0([span.start_s for span in recording.spans], recording.readings)
        ends = to_rank_0([span.end_s for span in recording.spans], recording.readings)
        times[recording.rank] = (recording.spans, starts, ends)
    origin_s = min((starts[0] for _, starts, _ in times.values() if starts), default=0.0)
    placed: dict[int, list[Placed]] = {}
    for rank, (spans, starts, ends) in times.items():
        placed[rank] = []
        for span, start_s, end_s in zip(spans, starts, ends, strict=True):
            start_ns = round((start_s - origin_s) * 1e9)
            shortest = _SHORTEST_OPERATION_NS if span.kind in OPERATIONS else 0
            end_ns = max(round((end_s - origin_s) * 1e9), start_ns + shortest)
            placed[rank].append(Placed(span, rank, start_ns, end_ns))
    return placed


def rows_of(operations: Sequence[Placed]) -> dict[int, int]:
    """Give each operation the first row of its rank that is free all the time; rows count from 1."""
    ends: dict[int, list[int]] = defaultdict(list)
    rows = {}
    for operation in operations:
        of_rank = ends[operation.rank]
        row = next((i for i, end_ns in enumerate(of_rank) if end_ns <= operation.start_ns), len(of_rank))
        of_rank[row : row + 1] = [operation.end_ns]
        rows[id(operation)] = row + 1
    return rows
