"""The files of a run's results; nothing of an earlier run is replaced before this one has begun to train."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hocket.loggers import JsonLines, Log, Logger
from hocket.training import CONFIG, MODEL, NEXT_CONFIG, NEXT_START, PICTURE, REPORT, SUMMARY, TRACE_FILE
from hocket.training.provenance import add_start, imported_versions, keep_user_modules, ranks_by_host

__all__ = ["Results"]


class Results:
    """What rank 0 writes of a run while it goes on; made when the task's modules have been imported.

    Args:
        folder: of the results; with the run's configuration in it, under the name `NEXT_CONFIG`, and what started it,
            as `NEXT_START`.
        traces: whether the run writes a trace.
        host_names: of all ranks.
        loggers: to which rows of metrics go, besides `metrics.jsonl`.

    Raises:
        UserError: a library that a logger needs is not installed.
    """

    def __init__(
        self, folder: Path, traces: bool, host_names: Sequence[str], loggers: Sequence[Logger] = ()
    ) -> None:
        self._folder = folder
        self._host_names = host_names
        self._traces = traces
        self._loggers = (JsonLines(), *(each for each in loggers if not isinstance(each, JsonLines)))
        for each in self._loggers:
            each.check()
        next_config = folder / NEXT_CONFIG
        # Found here, as looking through what is installed takes too long while a step is timed.
        self._packages = (
            imported_versions(yaml.safe_load(next_config.read_text())) if next_config.exists() else {}
        )
        self._resumed_after: int | None = None
        self._logs: list[Log] | None = None

    def resume_after(self, step: int) -> None:
        """Keep the rows of metrics up to `step`, in place of beginning anew."""
        self._resumed_after = step

    def begin(self) -> None:
        """Put this run in the place of an earlier one, the first time; called when a step has ended."""
        if self._logs is not None:
            return
        outdated = [SUMMARY, MODEL, PICTURE, REPORT, *([] if self._traces else [TRACE_FILE])]
        for name in outdated:
            (self._folder / name).unlink(missing_ok=True)
        next_config = self._folder / NEXT_CONFIG
        if next_config.exists():
            next_config.replace(self._folder / CONFIG)
        config = self._folder / CONFIG
        told = yaml.safe_load(config.read_text()) if config.exists() else {}
        self._tell_start(told)
        self._logs = [logger.open(self._folder, told, self._resumed_after) for logger in self._loggers]

    def _tell_start(self, config: Mapping[str, Any]) -> None:
        path = self._folder / NEXT_START
        if not path.exists():
            return
        start = json.loads(path.read_text(encoding="utf-8"))
        start["hosts"] = ranks_by_host(self._host_names)
        start["sources"] = keep_user_modules(config, self._folder, resumed=self._resumed_after is not None)
        start["packages"] |= self._packages
        add_start(self._folder, start, anew=self._resumed_after is None)
        path.unlink()

    def write(self, row: dict[str, Any]) -> None:
        """Add a row of metrics."""
        assert self._logs is not None, "the results have not begun"
        for log in self._logs:
            log.write(row)

    def close(self) -> None:
        """End the logs."""
        for log in self._logs or ():
            log.close()
