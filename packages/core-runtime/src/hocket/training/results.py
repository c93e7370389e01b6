"""The files of a run's results; nothing of an earlier run is replaced before this one has begun to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from hocket.training import CONFIG, METRICS, MODEL, NEXT_CONFIG, PICTURE, REPORT, SUMMARY, TRACE_FILE

__all__ = ["Results"]


class Results:
    """What rank 0 writes of a run while it goes on.

    Args:
        folder: of the results; with the run's configuration in it, under the name `NEXT_CONFIG`.
        traces: whether the run writes a trace.
    """

    def __init__(self, folder: Path, traces: bool) -> None:
        self._folder = folder
        self._traces = traces
        self._resumed_after: int | None = None
        self._metrics: TextIO | None = None

    def resume_after(self, step: int) -> None:
        """Keep the lines of metrics up to `step`, in place of beginning anew."""
        self._resumed_after = step

    def begin(self) -> None:
        """Put this run in the place of an earlier one, the first time; called when a step has ended."""
        if self._metrics is not None:
            return
        outdated = [SUMMARY, MODEL, PICTURE, REPORT, *([] if self._traces else [TRACE_FILE])]
        for name in outdated:
            (self._folder / name).unlink(missing_ok=True)
        next_config = self._folder / NEXT_CONFIG
        if next_config.exists():
            next_config.replace(self._folder / CONFIG)
        path = self._folder / METRICS
        if self._resumed_after is None:
            self._metrics = path.open("w")
        else:
            self._metrics = path.open("a+")
            _drop_rows_after(self._resumed_after, self._metrics)

    def write(self, row: dict[str, Any]) -> None:
        """Add a line of metrics."""
        assert self._metrics is not None, "the results have not begun"
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        """End the file of metrics."""
        if self._metrics is not None:
            self._metrics.close()


def _drop_rows_after(step: int, metrics: TextIO) -> None:
    """Remove what a run wrote between its last checkpoint and its end, the last line perhaps in part."""
    metrics.seek(0)
    kept = []
    for line in metrics:
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    metrics.seek(len("".join(kept).encode()))
    metrics.truncate()
