"""Runs of `hocket run` for the benchmarks that train, each in its own folder, and numbers over seeds.

A run's folder keeps its configuration and its summary, so that what is there already is not run again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Cell(Protocol):
    """A run of a table; hashable."""

    @property
    def folder(self) -> str:
        """The name of its folder, no other's."""

    def command(self) -> Iterable[str]:
        """Return a recipe and overrides."""


@dataclass(frozen=True)
class Run:
    """A run that is over.

    Attributes:
        summary: what `hocket run` says of it.
        folder: where it lies, with all metrics.
    """

    summary: dict[str, Any]
    folder: Path

    @property
    def accuracy(self) -> float:
        """Of the replicas' mean on the validation samples, in per cent."""
        return 100 * float(self.summary["valid_accuracy"])


_Cell = TypeVar("_Cell", bound=Cell)


def run_all(cells: Sequence[_Cell], out: Path, jobs: int) -> dict[_Cell, Run]:
    """Run what is missing, some at a time, show how far it is, and return all runs in the cells' order."""
    found: dict[_Cell, Run] = {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_run, cell, out): cell for cell in cells}
        for future in as_completed(futures):
            cell = futures[future]
            found[cell] = future.result()
            print(f"{len(found)}/{len(cells)} {cell.folder}: {found[cell].accuracy:.2f} %", flush=True)
    return {cell: found[cell] for cell in cells}


def spread(values: Sequence[float]) -> str:
    """Return mean and deviation."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def file_name(title: str) -> str:
    """Return what stands for a row's title in a folder's name."""
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in title)


def _run(cell: Cell, out: Path) -> Run:
    folder = out / cell.folder
    if not (folder / "summary.json").exists():
        program = [sys.executable, "-m", "hocket", "run", *cell.command(), "--out", str(folder)]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    return Run(json.loads((folder / "summary.json").read_text()), folder)
