"""The display of a run in progress: a bar on a terminal, else plain lines. Rank 0 only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from hocket.training import VALID
from hocket.training.history import is_number

__all__ = ["Lines", "ProgressBar", "observer_for", "text_of_metrics"]

#: Set by the parent process where its own output is a terminal: a rank's never is under mpiexec.
TERMINAL_VARIABLE = "HOCKET_TERMINAL"


class Lines:
    """A line per epoch, and one per logging step within the first."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def row(self, row: dict[str, Any]) -> None:
        """Show a line of metrics."""
        print(_text(row, self._steps), flush=True)

    def step(self, step: int) -> None:
        """Nothing is shown for steps between the rows."""

    def close(self) -> None:
        """Nothing is left open."""


class ProgressBar:
    """A bar over all steps, with the last row of metrics beside it."""

    def __init__(self, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stdout, force_terminal=True, width=int(os.environ.get("COLUMNS", "100")))
        self._steps = steps
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=steps)
        self._progress.start()

    def row(self, row: dict[str, Any]) -> None:
        """Show a line of metrics; the ones with a validation stay on the screen."""
        if row.get("valid_loss") is not None:
            self._progress.console.print(_text(row, self._steps))
        self._progress.update(self._task, description=f"loss {row['train_loss']:.4f}")

    def step(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Give the terminal back."""
        self._progress.stop()


def observer_for(rank: int, steps: int) -> Lines | ProgressBar | None:
    """Return what shows the run on this rank: nothing on others than rank 0."""
    if rank != 0:
        return None
    return ProgressBar(steps) if os.environ.get(TERMINAL_VARIABLE) == "1" else Lines(steps)


def _text(row: dict[str, Any], steps: int) -> str:
    text = f"epoch {row['epoch']}  step {row['step']}/{steps}  training loss {row['train_loss']:.4f}"
    if row.get("valid_loss") is not None:
        text += f"  validation {text_of_metrics(row)}"
    return f"{text}  ({row['seconds']:.1f} s)"


def text_of_metrics(values: Mapping[str, Any]) -> str:
    """Write loss and metrics on held-out samples, those that are numbers."""
    found = {
        name.removeprefix(VALID).replace("_", " "): value
        for name, value in values.items()
        if name.startswith(VALID) and is_number(value)
    }
    told = [
        f"{n} {100 * value:.2f} %" if n == "accuracy" else f"{n} {value:.4f}" for n, value in found.items()
    ]
    return ", ".join(told)
