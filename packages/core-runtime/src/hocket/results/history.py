"""The rows of `metrics.jsonl` as series over steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from hocket.loggers import read_lines
from hocket.plain import Tree, TreeView
from hocket.results import HELD_OUT
from hocket.strict_json import loads

_log = logging.getLogger("hocket")

#: A line of `metrics.jsonl`.
Row = TreeView

#: A row and a number in it.
Point = tuple[Row, float]


def read_rows(path: Path) -> list[Row]:
    """Return the complete lines of a run's metrics, without an incomplete last one.

    Raises:
        ValueError: all lines are damaged.
    """
    lines, damaged = read_lines(path)
    rows = [row for _, row in lines if is_number(row.get("seconds"))]
    damaged += len(lines) - len(rows)
    if damaged and not rows:
        raise ValueError("all of its lines are damaged")
    if damaged:
        _log.warning("%s: %d of %d lines are damaged and were skipped", path, damaged, damaged + len(rows))
    return rows


def read_summary(path: Path) -> Tree:
    """Return a run's summary.

    Raises:
        ValueError: it is damaged.
    """
    summary = loads(path.read_bytes())
    if not isinstance(summary, dict):
        raise ValueError("it is not a mapping")
    for name in ("steps", "ranks", "seconds"):
        if not is_number(summary.get(name)):
            raise ValueError(f"{name} is not a number")
    return summary


def points(rows: Sequence[Row], name: str) -> list[Point]:
    """Return the rows in which `name` is a number, each with that number."""
    return [(row, float(row[name])) for row in rows if is_number(row.get(name))]


def metric_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the metrics on held-out samples that are numbers, the loss first."""
    names = [name for row in rows for name in row if held_out(name) and is_number(row[name])]
    return list(dict.fromkeys(names))


def held_out(name: str) -> str | None:
    """Return the name of a metric on held-out samples without its first word, such as `valid_`; None for others."""
    first, *rest = re.split(r"[^a-z]", name, maxsplit=1)
    return "".join(rest) or name if first in HELD_OUT else None


def is_number(value: object) -> bool:
    """Return whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
