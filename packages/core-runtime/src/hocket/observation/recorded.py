"""A rank's recording, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hocket.observation.clock import Reading
from hocket.observation.recording import ON_TRAINING_THREAD, Kind

__all__ = ["Recording", "Span", "read"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one rank.

    Attributes:
        kind, name, round, num_bytes, sender, receiver: as it began.
        start_s, end_s: on the rank's own clock; it ends with the recording where it is not `ended`.
        ended: whether its end was written down.
        error: what went wrong, or None.
    """

    kind: Kind
    name: str
    round: int
    num_bytes: float
    sender: int
    receiver: int
    start_s: float
    end_s: float
    ended: bool
    error: str | None


@dataclass(frozen=True)
class Recording:
    """A rank's recording, read.

    Attributes:
        rank, size, transport: the rank's place.
        readings: of the clocks, in the order of time.
        spans: by the time of their start; of the training thread's, those that contain others come first.
    """

    rank: int
    size: int
    transport: str
    readings: tuple[Reading, ...]
    spans: tuple[Span, ...]


def read(data: bytes) -> Recording:
    """Read a recording, also one that breaks off."""
    # What follows the last line feed was cut off in the middle, or was never written.
    header, *lines = map(json.loads, data[: data.rfind(b"\n") + 1].splitlines())
    readings = tuple(Reading(**line) for line in lines if isinstance(line, dict))
    marks = [line for line in lines if isinstance(line, list)]
    ends = {number: rest for number, *rest in marks if len(rest) < 3}
    last_s = max((mark[1] for mark in marks), default=0.0)
    spans = [_span(mark, ends.get(mark[0]), last_s) for mark in marks if len(mark) > 3]
    spans.sort(key=_order)
    return Recording(header["rank"], header["size"], header["transport"], readings, tuple(spans))


def _order(span: Span) -> tuple[float, float, int]:
    # Stable: messages that are sent at one time stay in the order in which they were sent.
    if span.kind in ON_TRAINING_THREAD:
        return span.start_s, -span.end_s, ON_TRAINING_THREAD.index(span.kind)
    return span.start_s, 0.0, 0


def _span(begin: list[Any], end: list[Any] | None, last_s: float) -> Span:
    _, start_s, kind, name, round, num_bytes, sender, receiver = begin
    end_s, *error = end or [last_s]
    return Span(
        Kind(kind),
        name,
        round,
        num_bytes,
        sender,
        receiver,
        start_s,
        end_s,
        ended=end is not None,
        error=error[0] if error else None,
    )
