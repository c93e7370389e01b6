"""A trace of all ranks in one file: recorded by each, joined by rank 0 when the session is closed."""

from __future__ import annotations

import contextlib
import gzip
import os
from pathlib import Path

import numpy as np

from hocket.arrays import Array
from hocket.disk import path_of, write_durably
from hocket.errors import HocketError, UserError, reason
from hocket.trace.clock import compare
from hocket.trace.observer import ExchangeEvent, Observer
from hocket.trace.perfetto import perfetto_trace
from hocket.trace.record import Recorder, SpanKind, read
from hocket.trace.transport import TracedPeer
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer


class Trace(Observer):
    """A trace of one session on all ranks, in one file, for https://ui.perfetto.dev.

    It shows the steps with their phases and exposed waits, every exchange, and every message of the transport, on
    one clock, each send joined to its receive. While the session goes on, each rank writes a recording into a folder
    beside `path` (`trace-recordings` for `trace.json.gz`), from which `merge_left` makes a trace if the session does
    not come to its end.

        with hocket.attach(model, optimizer, "agd", observer=hocket.Trace("trace.json.gz")) as session:
            ...

    Args:
        path: the trace's file, the same on every rank; rank 0 writes it when the session is closed, compressed if it
            ends with `.gz`. An existing one is removed.
        steps: the steps to record, counted from 0: (100, 120) for 100 to 119; None for all. Spans that begin within
            them are followed to their ends.

    Raises:
        ValueError: no step lies between those of `steps`.
    """

    def __init__(self, path: str | os.PathLike[str], steps: tuple[int, int] | None = None) -> None:
        if steps is not None and not 0 <= steps[0] < steps[1]:
            raise ValueError(
                f"steps {steps} are empty; allowed: the first step, counted from 0, and the step after the last"
            )
        self._path = path_of(path, "Trace")
        self._steps = None if steps is None else range(*steps)
        self._peer: Peer | None = None

    def join(self, peer: Peer) -> Peer:
        """Begin the recording, and return a peer that records its messages; collective.

        Raises:
            HocketError: this trace belongs to another session.
            UserError: the recording cannot be written.
        """
        if self._peer is not None:
            raise HocketError("a Trace can be used by one session only: make another one")
        self._peer = peer
        folder = _folder(self._path)
        try:
            if peer.rank == 0:
                for left in folder.glob("rank-*.jsonl"):
                    left.unlink()
            self._lane = peer.lane("trace")  # from here on all know that what older runs left is gone
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"rank-{peer.rank:04}.jsonl"
            self._recorder = Recorder(file, peer.rank, peer.size, peer.transport, peer.clock.now)
        except OSError as error:
            raise UserError(f"trace {self._path} cannot be written: {reason(error)}") from error
        self._recorder.clocks(compare(self._lane, peer.clock.now))
        self._begin_step(0)
        self._spans: dict[tuple[str, int], int] = {}
        self._phase: tuple[str, float] | None = None
        self._step_start_s: float | None = None
        return TracedPeer(peer, self._recorder)

    def started(self, exchange: ExchangeEvent) -> None:
        self._spans[exchange.name, exchange.round] = self._recorder.begin(
            SpanKind.EXCHANGE, exchange.name, exchange.round, exchange.num_bytes, at_s=exchange.start_s
        )

    def complete(self, exchange: ExchangeEvent) -> None:
        self._recorder.end(self._spans.pop((exchange.name, exchange.round)), at_s=exchange.end_s)

    def failed(self, exchange: ExchangeEvent, error: BaseException) -> None:
        self._recorder.end(self._spans.pop((exchange.name, exchange.round)), error, exchange.end_s)

    def waited(self, exchange: ExchangeEvent, start_s: float, end_s: float) -> None:
        self._note(SpanKind.EXPOSED_WAIT, exchange.name, start_s, end_s)

    def phase(self, name: str, start_s: float) -> None:
        self._end_phase(start_s)
        self._phase = (name, start_s)
        if self._step_start_s is None:
            self._step_start_s = start_s

    def step_ended(self, step: int, end_s: float) -> None:
        self._end_phase(end_s)
        if self._step_start_s is not None:
            self._note(SpanKind.STEP, f"step {step}", self._step_start_s, end_s)
            self._step_start_s = None
        self._begin_step(step + 1)

    def close(self) -> None:
        """Send the recordings to rank 0, which writes the trace; collective.

        Raises:
            UserError: the trace cannot be written.
        """
        peer = self._peer
        assert peer is not None
        self._recorder.clocks(compare(self._lane, peer.clock.now))
        self._recorder.close()
        recordings = _gather(peer, self._lane, self._recorder.path.read_bytes())
        self._lane.close()
        if peer.rank == 0:
            _write(self._path, recordings)
        self._recorder.path.unlink()
        with contextlib.suppress(OSError):
            _folder(self._path).rmdir()  # the last rank of a host can

    def abandon(self) -> None:
        """Leave the recording in its place."""
        self._recorder.close()

    def _begin_step(self, step: int) -> None:
        self._recorder.recording = self._steps is None or step in self._steps

    def _end_phase(self, end_s: float) -> None:
        if self._phase is not None:
            self._note(SpanKind.PHASE, *self._phase, end_s)
            self._phase = None

    def _note(self, kind: SpanKind, name: str, start_s: float, end_s: float) -> None:
        self._recorder.end(self._recorder.begin(kind, name, at_s=start_s), at_s=end_s)


def merge_left(path: str | os.PathLike[str]) -> bool:
    """Make a trace from the recordings of a run that did not come to its end.

    Args:
        path: the trace's file, as given to `Trace`.

    Returns:
        Whether there were recordings. They are kept.
    """
    files = sorted(_folder(Path(path)).glob("rank-*.jsonl"))
    # A rank that was ended at once has not even written its first line.
    left = [data for data in (file.read_bytes() for file in files) if b"\n" in data]
    if left:
        _write(Path(path), left)
    return bool(left)


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name.partition('.')[0]}-recordings")


def _write(path: Path, recordings: list[bytes]) -> None:
    try:
        text = perfetto_trace([read(data) for data in recordings]).encode()
        # Stronger compression takes longer than the merge.
        packed = gzip.compress(text, compresslevel=1) if path.suffix == ".gz" else text
        write_durably(path, lambda file: file.write(packed))
    except OSError as error:
        raise UserError(f"trace {path} cannot be written: {reason(error)}") from error


def _gather(peer: Peer, lane: Lane, data: bytes) -> list[bytes]:
    """Return every rank's data on rank 0, nothing elsewhere; hosts need no folder in common for it."""
    lengths = [int(length) for length in peer.allgather_bytes(str(len(data)).encode())]
    if peer.rank != 0:
        lane.isend(np.frombuffer(data, dtype=np.uint8), 0, 0).wait()
        return []
    gathered = [data]
    for rank, length in enumerate(lengths[1:], start=1):
        received: Array = np.empty(length, dtype=np.uint8)
        lane.irecv(received, rank, 0).wait()
        gathered.append(received.tobytes())
    return gathered
