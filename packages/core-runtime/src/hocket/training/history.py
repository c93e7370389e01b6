"""The rows of `metrics.jsonl` as series over steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.training import VALID

__all__ = ["Point", "Row", "is_number", "metric_names", "points", "read_rows"]

#: A line of `metrics.jsonl`.
Row = Mapping[str, Any]

#: A row and a number in it.
Point = tuple[Row, float]


def read_rows(path: Path) -> list[Row]:
    """Return the complete lines of a run's metrics; the last line of an interrupted run may be a part of one."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def points(rows: Sequence[Row], name: str) -> list[Point]:
    """Return the rows in which `name` is a number, with it."""
    return [(row, float(row[name])) for row in rows if is_number(row.get(name))]


def metric_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the metrics on held-out samples that are numbers, the loss first."""
    names = [name for row in rows for name in row if name.startswith(VALID) and is_number(row[name])]
    return list(dict.fromkeys(names))


def is_number(value: object) -> bool:
    """Say whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
