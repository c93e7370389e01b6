"""Loggers that write a file of their own."""

from __future__ import annotations

import csv
import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TextIO

from hocket.disk import naming, write_text
from hocket.loggers.api import Log, Logger, Row
from hocket.own_files import set_aside
from hocket.plain import Tree, TreeView
from hocket.strict_json import dumps, loads, without_nan

_log = logging.getLogger("hocket")


@dataclass(frozen=True)
class JsonLines(Logger):
    """`metrics.jsonl`, a line for each row. Every run writes it, because comparisons, reports and pictures need it."""

    files: ClassVar = ("metrics.jsonl",)

    def open(self, folder: Path, config: TreeView, resumed_after: int | None) -> Log:
        return _JsonLog(folder / "metrics.jsonl", resumed_after)


class _JsonLog(Log):
    def __init__(self, path: Path, resumed_after: int | None) -> None:
        kept: list[str] = []
        if resumed_after is not None and path.exists():
            lines, damaged = read_lines(path)
            kept = [text for text, row in lines if row["step"] <= resumed_after]
            _keep_damaged(path, damaged)
        with naming(path):
            write_text(path, "".join(kept), sync=bool(kept))
            self._file = path.open("a", encoding="utf-8")
        self._path = path

    def write(self, row: Row) -> None:
        with naming(self._path):
            self._file.write(dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


def read_lines(path: Path) -> tuple[list[tuple[str, Row]], int]:
    """Return the lines of a file with their rows, and the number of damaged lines, which are left out.

    An incomplete last line, as an interrupted run leaves it, does not count as damaged.
    """
    lines: list[tuple[str, Row]] = []
    damaged = 0
    for data in path.read_bytes().splitlines(keepends=True):
        if not data.endswith(b"\n"):
            continue
        try:
            text = data.decode()
            row = loads(text)
        except ValueError:
            row = None
        if isinstance(row, dict) and _is_step(row.get("step")):
            lines.append((text, row))
        else:
            damaged += 1
    return lines, damaged


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _keep_damaged(path: Path, damaged: int) -> None:
    """Keep a file of which damaged lines are left out, under another name."""
    if damaged:
        lines = "a damaged line is" if damaged == 1 else f"{damaged} damaged lines are"
        _log.warning("%s: %s left out; the file is kept as %s", path, lines, set_aside(path).name)


@dataclass(frozen=True)
class Csv(Logger):
    """`metrics.csv`, with a column for each number; a cell is empty if its row lacks the number."""

    files: ClassVar = ("metrics.csv",)

    def open(self, folder: Path, config: TreeView, resumed_after: int | None) -> Log:
        return _CsvLog(folder / "metrics.csv", resumed_after)


class _CsvLog(Log):
    def __init__(self, path: Path, resumed_after: int | None) -> None:
        self._path = path
        self._columns: list[str] = []
        kept: list[Tree] = []
        if resumed_after is not None and path.exists():
            rows, damaged = self._sound_rows()
            kept = [row for row in rows if int(row["step"]) <= resumed_after]
            _keep_damaged(path, damaged)
        self._file = self._begin(kept)

    def write(self, row: Row) -> None:
        cells = {
            name: value for name, value in without_nan(row).items() if not isinstance(value, list | dict)
        }
        new = [name for name in cells if name not in self._columns]
        with naming(self._path):
            if new:
                self._file.close()
                rows = self._rows()
                self._columns += new
                self._file = self._begin(rows)
            csv.DictWriter(self._file, self._columns).writerow(cells)
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()

    def _rows(self) -> list[Tree]:
        """Return the rows that this log has written."""
        with self._path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            self._columns = list(reader.fieldnames or [])
        return rows

    def _sound_rows(self) -> tuple[list[Tree], int]:
        """Return the rows of an interrupted run, and the number of damaged lines, which are left out."""
        lines = self._path.read_bytes().decode(errors="replace").splitlines(keepends=True)
        [names, *_] = [*_cells(lines[0]), []] if lines else [[]]
        if "step" not in names:
            return [], len(lines)
        rows, damaged = [], 0
        self._columns = names
        for line in lines[1:]:
            [cells, *_] = [*_cells(line), []]
            row = dict(zip(names, cells, strict=False))
            if len(cells) == len(names) and row["step"].isdecimal():
                rows.append(row)
            else:
                damaged += line.endswith("\n")
        return rows, damaged

    def _begin(self, rows: list[Tree]) -> TextIO:
        """Write the file anew with these rows under the columns that are known, and leave it open."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        if self._columns:
            writer.writeheader()
        writer.writerows(rows)
        with naming(self._path):
            write_text(self._path, text.getvalue(), sync=False)
            return self._path.open("a", newline="", encoding="utf-8")


def _cells(line: str) -> list[list[str]]:
    """Return a line's cells as the only element; nothing if it is no line of CSV."""
    try:
        return list(csv.reader([line]))
    except csv.Error:
        return []
