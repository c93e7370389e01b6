"""Loggers that write a file of their own."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

from hocket.disk import UNFINISHED
from hocket.loggers.api import Log, Logger, Row

__all__ = ["Csv", "JsonLines"]


@dataclass(frozen=True)
class JsonLines(Logger):
    """`metrics.jsonl`, a line for each row. Every run writes it, as comparisons, reports and pictures read it."""

    files: ClassVar = ("metrics.jsonl",)

    def open(self, folder: Path, config: Mapping[str, Any], resumed_after: int | None) -> Log:
        return _JsonLog(folder / "metrics.jsonl", resumed_after)


class _JsonLog(Log):
    def __init__(self, path: Path, resumed_after: int | None) -> None:
        self._file = path.open("w" if resumed_after is None else "a+")
        if resumed_after is not None:
            _drop_rows_after(resumed_after, self._file)

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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


@dataclass(frozen=True)
class Csv(Logger):
    """`metrics.csv`, a column for each number; where a row lacks one, the cell is empty."""

    files: ClassVar = ("metrics.csv",)

    def open(self, folder: Path, config: Mapping[str, Any], resumed_after: int | None) -> Log:
        return _CsvLog(folder / "metrics.csv", resumed_after)


class _CsvLog(Log):
    def __init__(self, path: Path, resumed_after: int | None) -> None:
        self._path = path
        self._columns: list[str] = []
        kept: list[dict[str, Any]] = []
        if resumed_after is not None and path.exists():
            kept = [row for row in self._rows() if row["step"] and int(row["step"]) <= resumed_after]
        self._file = self._begin(kept)

    def write(self, row: Row) -> None:
        cells = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
        new = [name for name in cells if name not in self._columns]
        if new:
            self._file.close()
            rows = self._rows()
            self._columns += new
            self._file = self._begin(rows)
        csv.DictWriter(self._file, self._columns).writerow(cells)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> list[dict[str, Any]]:
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            self._columns = list(reader.fieldnames or [])
        return rows

    def _begin(self, rows: list[dict[str, Any]]) -> TextIO:
        """Write the file anew with these rows under the columns that are known, and leave it open."""
        whole = self._path.with_name(self._path.name + UNFINISHED)
        with whole.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if self._columns:
                writer.writeheader()
            writer.writerows(rows)
        whole.replace(self._path)
        return self._path.open("a", newline="")
