"""The files of a run's results; nothing of an earlier run is replaced before this one has begun to train."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from hocket.checkpoint.folder import keep_newest
from hocket.disk import naming, write_text
from hocket.loggers import JsonLines, Log, Logger
from hocket.own_files import claim, foreign, remember
from hocket.plain import Tree, TreeView
from hocket.results import (
    CHECKPOINTS,
    CONFIG,
    MODEL,
    NEXT_CONFIG,
    NEXT_START,
    PICTURE,
    RECORDINGS,
    REPORT,
    STARTS,
    SUMMARY,
    TRACE_FILE,
)
from hocket.results.kept_config import text_of_config
from hocket.results.provenance import add_start, imported_versions, keep_user_modules, ranks_by_host
from hocket.strict_json import dumps

#: The names that every run writes; copies of its modules go to folders that are free.
OF_RUN = (CONFIG, NEXT_CONFIG, STARTS, NEXT_START, SUMMARY, MODEL, PICTURE, CHECKPOINTS)


def files_of(loggers: Sequence[Logger], *, trace: bool, report: bool) -> list[str]:
    """Return the names of the files and folders that a run writes into the folder of its results."""
    of_loggers = [name for each in (JsonLines(), *loggers) for name in each.files]
    traced = [TRACE_FILE, RECORDINGS] if trace else []
    return [*OF_RUN, *([REPORT] if report else []), *traced, *of_loggers]


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of an earlier run from the folder of its results."""
    keep_newest(folder / CHECKPOINTS, 0, "replaced")


class Results:
    """The results that rank 0 writes while a run goes on; made after the task's modules were imported.

    Args:
        folder: the folder of the results, with the run's configuration in it as `NEXT_CONFIG`, and its start as
            `NEXT_START`.
        host_names: the ranks' hosts, by rank.
        loggers: the loggers that get rows of metrics, besides `metrics.jsonl`.
        owned: the names of the other files and folders that the run writes: the rest of an earlier run's stays.

    Raises:
        UserError: a library that a logger needs is not installed.
    """

    def __init__(
        self,
        folder: Path,
        host_names: Sequence[str],
        loggers: Sequence[Logger] = (),
        owned: Sequence[str] = OF_RUN,
    ) -> None:
        self._folder = folder
        self._owned = owned
        self._host_names = host_names
        self._loggers = (JsonLines(), *(each for each in loggers if not isinstance(each, JsonLines)))
        for each in self._loggers:
            each.check()
        next_config = folder / NEXT_CONFIG
        # Found here: a look through all installed packages takes too long while a step is timed.
        self._packages = (
            imported_versions(yaml.safe_load(next_config.read_bytes())) if next_config.exists() else {}
        )
        self._resumed_after: int | None = None
        self._config: Tree | None = None
        self._logs: list[Log] | None = None

    def resume_after(self, step: int) -> None:
        """Keep the rows of metrics up to `step` instead of beginning anew.

        Later rows stay until the first new one. A run that dies before may have a checkpoint beyond `step`, which its
        disk showed late, and goes on from that one then.
        """
        self._resumed_after = step

    def begin(self) -> None:
        """Replace an earlier run's results, at the first call; called when a step has ended.

        Raises:
            WriteError: a file cannot be written; names it.
        """
        if self._config is None:
            with naming(self._folder):
                self._config = self._begin()
                if self._resumed_after is None:
                    self._logs = self._opened(self._config)

    def _opened(self, config: TreeView) -> list[Log]:
        return [logger.open(self._folder, config, self._resumed_after) for logger in self._loggers]

    def _begin(self) -> Tree:
        folder, next_config = self._folder, self._folder / NEXT_CONFIG
        claim(folder, *self._owned, *(name for each in self._loggers for name in each.files))
        found = next((path for path in (next_config, folder / CONFIG) if path.exists()), None)
        config: Tree = yaml.safe_load(found.read_text(encoding="utf-8")) if found else {}
        self._write_start(config)
        if next_config.exists():
            next_config.replace(folder / CONFIG)
            remember(folder, CONFIG, [text_of_config(config)])
        outdated = [SUMMARY, MODEL, PICTURE, REPORT, TRACE_FILE]
        for name in outdated:
            if not foreign(folder, [name]):
                (folder / name).unlink(missing_ok=True)
        if self._resumed_after is None and CHECKPOINTS in self._owned:
            remove_checkpoints(folder)
        return config

    def _write_start(self, config: TreeView) -> None:
        path = self._folder / NEXT_START
        if not path.exists():
            return
        start = json.loads(path.read_text(encoding="utf-8"))
        start["hosts"] = ranks_by_host(self._host_names)
        start["sources"] = keep_user_modules(config, self._folder, resumed=self._resumed_after is not None)
        start["packages"] |= self._packages
        add_start(self._folder, start, anew=self._resumed_after is None)
        path.unlink()

    def write(self, row: Tree) -> None:
        """Add a row of metrics."""
        assert self._config is not None, "the results have not begun"
        if self._logs is None:
            with naming(self._folder):
                self._logs = self._opened(self._config)
        for log in self._logs:
            log.write(row)

    def close(self) -> None:
        """Close all logs."""
        with contextlib.ExitStack() as stack:
            for log in self._logs or ():
                stack.callback(log.close)


def write_summary(folder: Path, summary: TreeView) -> None:
    """Write the summary of a run that has ended.

    Raises:
        WriteError: it cannot be written; names it.
    """
    with naming(folder / SUMMARY):
        write_text(folder / SUMMARY, dumps(summary, indent=2) + "\n")
