"""Delays from a file, such as those that were measured elsewhere."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hocket.delays.api import Delays, check_seconds

_COLUMNS = ["rank", "step", "seconds"]


@dataclass(frozen=True)
class Recorded(Delays):
    """The delays in a CSV file: a line `rank,step,seconds` first, then one for each delay, in any order.

    A rank without a line for a step is not delayed in it; several lines for one add up.

    Attributes:
        file: the file's path, which may begin with `~`; a relative path begins where the command was started.
        repeat: whether to begin again after the last step of the file; else later steps have no delays.

    Raises:
        ValueError: the file cannot be read or has another form; names the line.
    """

    file: str
    repeat: bool = False
    _lines: dict[int, list[tuple[int, float]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            with Path(self.file).expanduser().open(newline="", encoding="utf-8") as lines:
                by_step: dict[int, list[tuple[int, float]]] = {}
                for rank, step, seconds in _read(self.file, lines):
                    by_step.setdefault(step, []).append((rank, seconds))
        except OSError as error:
            raise ValueError(f"file {self.file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"file {self.file} is not UTF-8 text") from error
        object.__setattr__(self, "_lines", by_step)

    def check_size(self, size: int) -> None:
        last = max((rank for lines in self._lines.values() for rank, _ in lines), default=0)
        if last >= size:
            raise ValueError(f"file {self.file} delays rank {last}; allowed: ranks from 0 to {size - 1}")

    def of_step(self, step: int, size: int, seed: int) -> NDArray[np.float64]:
        if self.repeat:
            step %= max(self._lines, default=0) + 1
        delays = np.zeros(size)
        for rank, seconds in self._lines.get(step, ()):
            delays[rank] += seconds
        return delays


def _read(file: str, lines: Iterator[str]) -> Iterator[tuple[int, int, float]]:
    """Yield (rank, step, seconds) of each line except the first.

    Raises:
        ValueError: a line has another form; the message begins with `file`.
    """
    rows = csv.reader(lines)
    if [name.strip() for name in next(rows, [])] != _COLUMNS:
        raise ValueError(f"file {file}, line 1: the column names are missing; write {','.join(_COLUMNS)}")
    for row in rows:
        if not row:
            continue
        where = f"file {file}, line {rows.line_num}"
        try:
            rank, step, seconds = int(row[0]), int(row[1]), float(row[2])
            is_whole = len(row) == len(_COLUMNS)
        except (IndexError, ValueError):
            is_whole = False
        if not is_whole or rank < 0 or step < 0:
            raise ValueError(f"{where}: got {','.join(row)!r}; allowed: rank and step from 0, and seconds")
        check_seconds(f"{where}: seconds", seconds)
        yield rank, step, seconds
