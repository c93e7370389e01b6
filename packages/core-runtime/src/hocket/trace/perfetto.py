"""A trace of all ranks in the JSON format that Chrome defined and Perfetto opens.

Each rank is a process with these tracks:

- `training`: the steps, their phases, and within them the waits that nothing hid;
- one per segment: its exchanges, which may overlap (asynchronous spans);
- `messages`: the transport's operations, on as many rows as there are at a time; an arrow joins each send to its
  receive;
- `bytes under way`: of the exchanges.

Source: "Trace Event Format" (Google, the document that chrome://tracing refers to). Perfetto binds an arrow to the
slice that contains its end on the same thread, which is why messages are slices of threads.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hocket.plain import Tree
from hocket.trace.clock import to_rank_0
from hocket.trace.record import ON_TRAINING_THREAD, OPERATIONS, Recording, Span, SpanKind

#: An event as Chrome's tracing format has it.
Event = Tree


# Threads need numbers that differ across processes, too, and 0 is the idle thread of an operating system.
_THREADS_PER_RANK = 10_000


def perfetto_trace(recordings: Sequence[Recording]) -> str:
    """Join the ranks' recordings into one trace, as text, an event in each line.

    Args:
        recordings: the recordings of different ranks of one run; some may be missing or break off.
    """
    aligned = align(recordings)
    events: list[Event] = []
    threads: dict[int, int] = {}
    for recording in recordings:
        of_rank = aligned[recording.rank]
        events += _training(of_rank)
        events += _exchanges(of_rank)
        events += _bytes_under_way(of_rank)
    operations = [p for of_rank in aligned.values() for p in of_rank if p.span.kind in OPERATIONS]
    rows = rows_of(operations)
    for operation in operations:
        row = rows[id(operation)]
        threads[operation.rank] = max(threads.get(operation.rank, 0), row)
        events.append(_slice(operation, row))
    arrows, unjoined = _arrows(operations, rows)
    events += arrows
    # Stable: of events at one time, what contains others stays before them.
    events.sort(key=lambda event: event["ts"])
    names = itertools.chain.from_iterable(
        _names(recording, threads.get(recording.rank, 0)) for recording in recordings
    )
    lines = ",\n".join(json.dumps(event) for event in (*names, *events))
    other = {
        "ranks": recordings[0].size,
        "recorded_ranks": [recording.rank for recording in recordings],
        "transport": recordings[0].transport,
        "unjoined_messages": unjoined,
    }
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [\n{lines}\n]}}\n'


def _training(of_rank: Sequence[AlignedSpan]) -> Iterator[Event]:
    for aligned in of_rank:
        # On a virtual clock most waits take no time.
        if aligned.span.kind in ON_TRAINING_THREAD and aligned.end_ns > aligned.start_ns:
            yield _slice(aligned, 0)


def _exchanges(of_rank: Sequence[AlignedSpan]) -> Iterator[Event]:
    for number, aligned in enumerate(of_rank):
        if aligned.span.kind is SpanKind.EXCHANGE:
            common = {
                "name": aligned.span.name,
                "cat": SpanKind.EXCHANGE,
                "id": f"{aligned.rank:x}.{number:x}",
                **_thread(aligned.rank, 0),
            }
            yield {"ph": "b", **common, "ts": aligned.start_ns / 1e3, "args": _arguments(aligned.span)}
            yield {"ph": "e", **common, "ts": aligned.end_ns / 1e3}


def _bytes_under_way(of_rank: Sequence[AlignedSpan]) -> Iterator[Event]:
    changes: dict[int, float] = defaultdict(float)
    for aligned in of_rank:
        if aligned.span.kind is SpanKind.EXCHANGE:
            changes[aligned.start_ns] += aligned.span.num_bytes
            changes[aligned.end_ns] -= aligned.span.num_bytes
            rank = aligned.rank
    for time_ns, total in zip(
        sorted(changes), itertools.accumulate(changes[t] for t in sorted(changes)), strict=True
    ):
        yield {
            "ph": "C",
            "name": "bytes under way",
            **_thread(rank, 0),
            "ts": time_ns / 1e3,
            "args": {"bytes": round(total)},
        }


def _arrows(operations: Sequence[AlignedSpan], rows: Mapping[int, int]) -> tuple[list[Event], int]:
    """Join each send to the receive that got it; return the arrows, and how many messages have only one end.

    Messages between the same two ranks in the same lane and round are received in the order in which they were sent.
    """
    sends: dict[tuple[object, ...], deque[AlignedSpan]] = defaultdict(deque)
    for operation in operations:
        if operation.span.kind is SpanKind.SEND:
            sends[_message(operation.span)].append(operation)
    arrows: list[Event] = []
    alone = 0
    for operation in operations:
        if operation.span.kind is not SpanKind.RECEIVE or operation.span.error is not None:
            continue
        waiting = sends[_message(operation.span)]
        if not waiting or not operation.span.ended:
            alone += 1
            continue
        send = waiting.popleft()
        common = {"name": "message", "cat": "message", "id": len(arrows) // 2 + 1}
        arrows.append({"ph": "s", **common, **_thread(send.rank, rows[id(send)]), "ts": send.start_ns / 1e3})
        arrows.append(
            {
                "ph": "f",
                "bp": "e",
                **common,
                **_thread(operation.rank, rows[id(operation)]),
                # Just before the slice ends, which contains it so.
                "ts": (operation.end_ns - 1) / 1e3,
            }
        )
    return arrows, alone + sum(map(len, sends.values()))


def _message(span: Span) -> tuple[object, ...]:
    return span.name, span.sender, span.receiver, span.round


def _slice(aligned: AlignedSpan, row: int) -> Event:
    span = aligned.span
    names = {
        SpanKind.SEND: f"send {span.name} to {span.receiver}",
        SpanKind.RECEIVE: f"receive {span.name} from {span.sender}",
        SpanKind.EXPOSED_WAIT: f"exposed wait for {span.name}",
        SpanKind.WAIT: f"wait for {span.name}",
    }
    return {
        "ph": "X",
        "name": names.get(span.kind, span.name),
        "cat": span.kind,
        **_thread(aligned.rank, row),
        "ts": aligned.start_ns / 1e3,
        "dur": (aligned.end_ns - aligned.start_ns) / 1e3,
        "args": _arguments(span),
    }


def _arguments(span: Span) -> dict[str, object]:
    arguments: dict[str, object] = {}
    if span.kind is SpanKind.EXCHANGE or span.kind in OPERATIONS:
        arguments = {"round": span.round, "bytes": span.num_bytes}
    if not span.ended:
        arguments["unfinished"] = True
    if span.error is not None:
        arguments["error"] = span.error
    return arguments


def _thread(rank: int, row: int) -> dict[str, int]:
    return {"pid": rank + 1, "tid": (rank + 1) * _THREADS_PER_RANK + row}


def _names(recording: Recording, rows: int) -> Iterator[Event]:
    """Name the processes and threads, and put them in order."""
    rank = recording.rank
    for about, key, value in (("name", "name", f"rank {rank}"), ("sort_index", "sort_index", rank)):
        yield {"ph": "M", "name": f"process_{about}", **_thread(rank, 0), "ts": 0, "args": {key: value}}
    for row in range(rows + 1):
        name = "messages" if row else "training"
        for about, key, value in (("name", "name", name), ("sort_index", "sort_index", row)):
            yield {"ph": "M", "name": f"thread_{about}", **_thread(rank, row), "ts": 0, "args": {key: value}}


# Long enough for an arrow to end within.
_SHORTEST_OPERATION_NS = 2


@dataclass(frozen=True, slots=True)
class AlignedSpan:
    """A span on the common clock.

    Attributes:
        span: the recorded span.
        rank: the rank of the recording.
        start_ns, end_ns: nanoseconds since the trace's first moment.
    """

    span: Span
    rank: int
    start_ns: int
    end_ns: int


def align(recordings: Sequence[Recording]) -> dict[int, list[AlignedSpan]]:
    """Translate all ranks' times into nanoseconds of one clock, from the first one on."""
    times = {}
    for recording in recordings:
        starts = to_rank_0([span.start_s for span in recording.spans], recording.readings)
        ends = to_rank_0([span.end_s for span in recording.spans], recording.readings)
        times[recording.rank] = (recording.spans, starts, ends)
    origin_s = min((starts[0] for _, starts, _ in times.values() if starts), default=0.0)
    aligned: dict[int, list[AlignedSpan]] = {}
    for rank, (spans, starts, ends) in times.items():
        aligned[rank] = []
        for span, start_s, end_s in zip(spans, starts, ends, strict=True):
            start_ns = round((start_s - origin_s) * 1e9)
            shortest = _SHORTEST_OPERATION_NS if span.kind in OPERATIONS else 0
            end_ns = max(round((end_s - origin_s) * 1e9), start_ns + shortest)
            aligned[rank].append(AlignedSpan(span, rank, start_ns, end_ns))
    return aligned


def rows_of(operations: Sequence[AlignedSpan]) -> dict[int, int]:
    """Return for each operation the first row of its rank that is free all the time, counted from 1."""
    ends: dict[int, list[int]] = defaultdict(list)
    rows = {}
    for operation in operations:
        of_rank = ends[operation.rank]
        row = next((i for i, end_ns in enumerate(of_rank) if end_ns <= operation.start_ns), len(of_rank))
        of_rank[row : row + 1] = [operation.end_ns]
        rows[id(operation)] = row + 1
    return rows
