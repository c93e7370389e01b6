"""What one rank writes down while it trains: a line for each beginning and each end.

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
import threading
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from hocket.observation.clock import Reading
from hocket.observation.mapped_file import MappedFile

__all__ = ["ON_TRAINING_THREAD", "OPERATIONS", "Kind", "Recorder"]

NOBODY = -1
# Few names come again and again.
_quoted = lru_cache(4096)(json.dumps)


class Kind(StrEnum):
    """What a span is."""

    #: What the training thread is in. These nest; of two that take the same time, the one that stands here first
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


ON_TRAINING_THREAD = (Kind.STEP, Kind.PHASE, Kind.EXPOSED_WAIT, Kind.WAIT)
OPERATIONS = (Kind.SEND, Kind.RECEIVE, Kind.COLLECTIVE)


class Recorder:
    """Writes this rank's recording; any thread of the rank may call it.

    A beginning or an end costs one to two microseconds.
    """

    def __init__(self, path: Path, rank: int, size: int, transport: str, now: Callable[[], float]) -> None:
        """Begin a recording, over an older one.

        Raises:
            OSError: it cannot be written there.
        """
        self.path = path
        self.now = now
        self._training_thread = threading.get_ident()
        self._numbers = itertools.count()
        self._file = MappedFile(path)
        self._append = self._file.append
        self._write_json({"rank": rank, "size": size, "transport": transport})

    @property
    def in_training_thread(self) -> bool:
        """Whether the thread that calls is the one that began the recording."""
        return threading.get_ident() == self._training_thread

    def begin(
        self,
        kind: Kind,
        name: str,
        round: int = 0,
        num_bytes: float = 0,
        sender: int = NOBODY,
        receiver: int = NOBODY,
        at_s: float | None = None,
    ) -> int:
        """Note that something begins, now or at `at_s`, and return the span's number.

        Args:
            kind: what.
            name: its own.
            round: of the exchange or the message.
            num_bytes: how much is sent.
            sender, receiver: of a message, as ranks of the recording.
            at_s: on this rank's clock.
        """
        number = next(self._numbers)
        time_s = self.now() if at_s is None else at_s
        # Added up, as formatting a member of an enum takes four times as long.
        named = '"' + kind + '",' + _quoted(name)
        line = f"[{number},{time_s:.9f},{named},{round},{num_bytes},{sender},{receiver}]\n"
        self._append(line.encode())
        return number

    def end(self, number: int, error: BaseException | str | None = None, at_s: float | None = None) -> None:
        """Note that a span ends, now or at `at_s`."""
        time_s = self.now() if at_s is None else at_s
        if error is None:
            self._append(f"[{number},{time_s:.9f}]\n".encode())
        else:
            text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            self._write_json([number, time_s, text])

    def clocks(self, reading: Reading) -> None:
        """Note a reading of the clocks."""
        self._write_json({"local_s": reading.local_s, "offset_s": reading.offset_s})

    def close(self) -> None:
        """Write no more: what is noted later is lost."""
        self._file.close()

    def _write_json(self, line: Any) -> None:
        self._append(json.dumps(line).encode() + b"\n")
