"""A rank's recording: a line for each beginning and each end, written while it trains, and read back.

The file is mapped into memory, so that a rank that is killed leaves everything that it has done. Lines are JSON:

- `{"rank": 0, "size": 2, "transport": "mpi"}`, the first;
- `{"local_s": 12.5, "offset_s": 0.0}`, a reading of the clocks;
- `[17, 12.500000001, "send", "gradients.0[3]", 5, 4096, 0, 1]`, a beginning: span, time, kind, name, round, bytes,
  sending and receiving rank;
- `[17, 12.6]` or `[17, 12.6, "what went wrong"]`, the end of that span.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from hocket.disk import naming
from hocket.trace.clock import ClockReading

NOBODY = -1
# The number of spans that began while nothing was recorded.
_UNSEEN = -1
# Few names come again and again.
_quoted = lru_cache(4096)(json.dumps)


class SpanKind(StrEnum):
    """The kinds of spans."""

    #: Spans of the training thread. These nest; of two that take the same time, the one that stands here first
    #: contains the other. The last is a wait for an operation of the transport.
    STEP = "step"
    PHASE = "phase"
    EXPOSED_WAIT = "exposed wait"
    WAIT = "wait"
    #: An exchange of a segment, which may overlap everything else.
    EXCHANGE = "exchange"
    #: Operations of the transport.
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"


ON_TRAINING_THREAD = (SpanKind.STEP, SpanKind.PHASE, SpanKind.EXPOSED_WAIT, SpanKind.WAIT)
OPERATIONS = (SpanKind.SEND, SpanKind.RECEIVE, SpanKind.COLLECTIVE)


class Recorder:
    """The writer of this rank's recording; any thread of the rank may call it.

    A beginning or an end costs one to two microseconds.

    Attributes:
        recording: whether spans that begin now are recorded; the end of a recorded span always is.
    """

    def __init__(self, path: Path, rank: int, size: int, transport: str, now: Callable[[], float]) -> None:
        """Begin a recording; an older one at `path` is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        self.path = path
        self.now = now
        self.recording = True
        self._training_thread = threading.get_ident()
        self._numbers = itertools.count()
        self._file = MappedFile(path)
        self._append = self._file.append
        self._write_json({"rank": rank, "size": size, "transport": transport})

    @property
    def in_training_thread(self) -> bool:
        """True in the thread that began the recording."""
        return threading.get_ident() == self._training_thread

    def begin(
        self,
        kind: SpanKind,
        name: str,
        round: int = 0,
        num_bytes: float = 0,
        sender: int = NOBODY,
        receiver: int = NOBODY,
        at_s: float | None = None,
    ) -> int:
        """Note that a span begins, now or at `at_s`, and return its number, also if it is not recorded.

        Args:
            kind: the span's kind.
            name: the span's name.
            round: the round of the exchange or message.
            num_bytes: the bytes that are sent.
            sender, receiver: a message's ranks, as numbered in the recording.
            at_s: the time of the beginning on this rank's clock, in seconds; None for now.
        """
        if not self.recording:
            return _UNSEEN
        number = next(self._numbers)
        time_s = self.now() if at_s is None else at_s
        # Added up, as formatting a member of an enum takes four times as long.
        named = '"' + kind + '",' + _quoted(name)
        line = f"[{number},{time_s:.9f},{named},{round},{num_bytes},{sender},{receiver}]\n"
        self._append(line.encode())
        return number

    def end(self, number: int, error: BaseException | str | None = None, at_s: float | None = None) -> None:
        """Note that a span ends, now or at `at_s`."""
        if number == _UNSEEN:
            return
        time_s = self.now() if at_s is None else at_s
        if error is None:
            self._append(f"[{number},{time_s:.9f}]\n".encode())
        else:
            text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            self._write_json([number, time_s, text])

    def clocks(self, reading: ClockReading) -> None:
        """Note a reading of the clocks."""
        self._write_json({"local_s": reading.local_s, "offset_s": reading.offset_s})

    def close(self) -> None:
        """Stop writing: later notes are lost."""
        self._file.close()

    def _write_json(self, line: object) -> None:
        self._append(json.dumps(line).encode() + b"\n")


_CHUNK_BYTES = 1 << 20


class MappedFile:
    """A file that is mapped into memory; any thread may append.

    Appended data is in the file, followed by zeros, even if the process is killed. Space is reserved before it is
    used: a full disk is an error, and not a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, or empty it.

        Raises:
            OSError: it cannot be written, or the disk is full.
        """
        self._lock = threading.Lock()
        self._used = 0
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.posix_fallocate(self._file, 0, _CHUNK_BYTES)
            self._map = mmap.mmap(self._file, _CHUNK_BYTES)
        except OSError:
            os.close(self._file)
            raise

    def append(self, data: bytes) -> None:
        """Append `data`, or nothing if the file is closed; takes half a microsecond.

        Raises:
            WriteError: the disk is full.
        """
        with self._lock:
            if self._map.closed:
                return
            end = self._used + len(data)
            if end > len(self._map):
                size = end + _CHUNK_BYTES
                with naming(self._path):
                    os.posix_fallocate(self._file, 0, size)
                self._map.resize(size)
            self._map[self._used : end] = data
            self._used = end

    def close(self) -> None:
        """Cut off the unused space, and close the file."""
        with self._lock:
            if not self._map.closed:
                self._map.close()
                os.ftruncate(self._file, self._used)
                os.close(self._file)


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time on one rank.

    Attributes:
        kind, name, round, num_bytes, sender, receiver: the arguments of `Recorder.begin`.
        start_s, end_s: seconds on the rank's own clock; a span that is not `ended` ends with the recording.
        ended: True if its end was recorded.
        error: the error that ended it, or None.
    """

    kind: SpanKind
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
        rank, size, transport: those of the session's peer.
        readings: the readings of clocks, in the order of time.
        spans: the spans, by the time of their start; on the training thread, those that contain others come first.
    """

    rank: int
    size: int
    transport: str
    readings: tuple[ClockReading, ...]
    spans: tuple[Span, ...]


def read(data: bytes) -> Recording:
    """Read a recording, also one that breaks off."""
    # The rest behind the last line feed was cut off in the middle, or was never written.
    header, *lines = map(json.loads, data[: data.rfind(b"\n") + 1].splitlines())
    readings = tuple(ClockReading(**line) for line in lines if isinstance(line, dict))
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
        SpanKind(kind),
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
