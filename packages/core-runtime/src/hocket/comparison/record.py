"""The content of a run's folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from hocket.errors import UserError, reason, some, suggest
from hocket.plain import Tree
from hocket.results import CONFIG, HELD_OUT, METRICS, NEXT_CONFIG, SUMMARY, SWEPT_CONFIG
from hocket.results.history import Point, Row, is_number, metric_names, points, read_rows, read_summary
from hocket.results.kept_config import changed_keys, read_config
from hocket.results.script import OWN_KEYS, SCRIPT

_log = logging.getLogger("hocket")

#: The advice for a folder from which a file is missing.
_AGAIN = "put the file back, or delete the folder and start the run again"


@dataclass(frozen=True)
class Record:
    """The content of a run's folder: configuration, metrics and summary.

    Attributes:
        folder: the folder's path.
        label: the run's name in tables and figures.
        config: its complete configuration.
        rows: the lines of its metrics, at least one.
        summary: the run's summary; None if the run has not ended.
    """

    folder: Path
    label: str
    config: Tree
    rows: Sequence[Row]
    summary: Tree | None

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return float(self.rows[-1]["seconds"])

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return int(self.rows[-1]["step"])

    @property
    def ranks(self) -> int:
        """The number of ranks that trained."""
        return int(self.config["ranks"])

    @property
    def ranks_in_words(self) -> str:
        """The number of ranks, and that of the islands which they form."""
        islands = (self.summary or {}).get("islands")
        return f"{self.ranks} ranks" + (f" in {islands} islands" if islands else "")

    @property
    def transport(self) -> str:
        """The transport; empty if the configuration leaves it open and the run has not ended."""
        name: str = (self.summary or self.config).get("transport") or ""
        return name

    @property
    def warnings(self) -> list[str]:
        """Sentences on exchanges and phases that the run never reached; none before it has ended."""
        return [*(self.summary or {}).get("warnings", ())]

    @property
    def is_timed(self) -> bool:
        """False if nothing but messages takes time: on the virtual clock, without `compute.step_s` and delays."""
        compute = self.config.get("compute")
        return (
            self.transport != "virtual" or compute is None or bool(compute["step_s"] or self.config["delays"])
        )

    @property
    def task(self) -> Tree:
        """The task's name and fields."""
        task: Tree = self.config["task"]
        return task

    @cached_property
    def names(self) -> list[str]:
        """The metrics that it has: numbers in its rows and its summary."""
        found = [name for row in (*self.rows, self.summary or {}) for name in row if is_number(row[name])]
        return [name for name in dict.fromkeys(found) if name not in ("epoch", "step")]

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics to show: those on held-out samples; of a script that writes none, all that it writes."""
        found = metric_names(self.rows)
        if found or self.task["name"] != SCRIPT:
            return found
        written = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in written if name in self.names and name not in OWN_KEYS]

    def series(self, name: str) -> list[Point]:
        """Return a metric over the run."""
        return points(self.rows, name)

    def last(self, name: str) -> float | None:
        """Return a metric's last value, or None if it has none."""
        found = points([*self.rows, self.summary or {}], name)
        return found[-1][1] if found else None

    def resolve(self, name: str) -> str:
        """Return a metric's full name for one with or without its first word, such as `valid_`.

        Raises:
            UserError: the run has no such metric; lists those that it has.
        """
        for full in (name, *(f"{word}_{name}" for word in HELD_OUT)):
            if full in self.names:
                return full
        raise UserError(
            f"{self.folder} has no metric {name!r}.{suggest(name, self.names)} There are: {', '.join(self.names)}."
        )


def read_records(folders: Sequence[Path]) -> tuple[list[Record], list[Path]]:
    """Read runs, and label each by the part of its path that the others do not share.

    Args:
        folders: runs' folders, or folders with runs in them.

    Returns:
        The runs, and the folders of those that have no metrics yet.

    Raises:
        UserError: a folder holds no run, or is named twice; or no run has metrics.
    """
    folders = [run for folder in folders for run in _runs_in(folder)]
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"{os.path.relpath(path)} is named {paths.count(path)} times: name each run once")
    shared = os.path.commonpath([path.parent for path in paths])
    found = [
        _read(folder, os.path.relpath(path, shared)) for folder, path in zip(folders, paths, strict=True)
    ]
    records = [record for record in found if record is not None]
    if not records:
        raise UserError(_without_metrics(folders[0]))
    return records, [folder for folder, record in zip(folders, found, strict=True) if record is None]


def runs_within(folder: Path) -> list[Path]:
    """Return the runs' folders in a folder, sorted by name; none if it does not exist."""
    return [each for each in sorted(folder.iterdir()) if _was_started(each)] if folder.is_dir() else []


def read_record(folder: Path, label: str) -> Record:
    """Read a run's folder.

    Raises:
        UserError: it holds no run, or one that has no metrics yet.
    """
    record = _read(folder, label)
    if record is None:
        raise UserError(_without_metrics(folder))
    return record


def _read(folder: Path, label: str) -> Record | None:
    """Read a run's folder; return None if the run has no metrics yet.

    Raises:
        UserError: it holds no run, or one of its files cannot be read.
    """
    if not _was_started(folder):
        raise UserError(f"{folder} holds no run: {_reason(folder)}")
    ended = (folder / SUMMARY).is_file()
    for name in (METRICS, CONFIG):
        if not (folder / name).is_file():
            if not ended:
                return None
            raise UserError(f"{folder}: the run has ended, but its {name} is missing: {_AGAIN}")
    try:
        rows = read_rows(path := folder / METRICS)
        config = read_config(path := folder / CONFIG)
        summary = read_summary(path := folder / SUMMARY) if ended else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read: {text}") from error
    if changed := changed_keys(folder / CONFIG, config):
        text = some([f"{key} was {was}, and is now {now}" for key, was, now in changed])
        _log.warning("%s was changed since the run wrote it: %s", folder / CONFIG, text)
    if summary and (rows[-1]["step"] if rows else 0) < summary["steps"]:
        raise UserError(
            f"{folder}: the run has ended after {summary['steps']} steps, but {METRICS} ends earlier: {_AGAIN}"
        )
    return Record(folder, label, config, rows, summary) if rows else None


def _without_metrics(folder: Path) -> str:
    return f"{folder} has no metrics: the run was interrupted before its first line of them"


def _was_started(folder: Path) -> bool:
    """Return whether a folder holds a run, be it one that has written no results yet."""
    return any((folder / name).is_file() for name in (CONFIG, NEXT_CONFIG, SWEPT_CONFIG))


def _runs_in(folder: Path) -> list[Path]:
    """Return a run's folder, or the runs in a folder of runs."""
    if (folder / CONFIG).is_file():
        return [folder]
    return runs_within(folder) or [folder]


def _reason(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "it is a file"
    return f"it has no {CONFIG}"
