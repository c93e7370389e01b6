"""The display of a run in progress: a bar on a terminal, else plain lines. Rank 0 only."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum

from hocket.plain import Tree, TreeView
from hocket.results.history import held_out, is_number


class Display(StrEnum):
    """The display of a run: errors alone, a bar, a line for each row of metrics, or longer lines."""

    QUIET = "quiet"
    BAR = "bar"
    LINES = "lines"
    VERBOSE = "verbose"


class Lines:
    """A line for each row of metrics; with `verbose` also speed, bytes sent and the share of waiting."""

    def __init__(self, steps: int, *, verbose: bool = False) -> None:
        self._steps = steps
        self._verbose = verbose
        self._before: Tree = {}

    def row(self, row: Tree) -> None:
        """Show a row of metrics."""
        more = _costs(row, self._before) if self._verbose else ""
        print(f"{_text(row, self._steps)}{more}", flush=True)
        self._before = row

    def step(self, step: int) -> None:
        """Nothing is shown for steps between the rows."""

    def close(self) -> None:
        """Nothing is left open."""


class ProgressBar:
    """A bar over all steps, with steps per second, the time left, and the last row's training loss."""

    def __init__(self, done: int, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # A rank's own output is no terminal under mpiexec, where `COLUMNS` says how wide that is.
        width = shutil.get_terminal_size().columns
        self._steps = steps
        self._progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(file=sys.stdout, force_terminal=True, width=width),
        )
        self._task = self._progress.add_task("", total=steps, completed=done, speed="")
        self._progress.start()

    def row(self, row: Tree) -> None:
        """Show a row of metrics; rows with a validation stay on the screen."""
        if row.get("valid_loss") is not None:
            self._progress.console.print(_text(row, self._steps))
        self._progress.update(self._task, description=f"loss {row['train_loss']:.4f}")

    def step(self, step: int) -> None:
        """Move the bar."""
        speed = self._progress.tasks[0].speed
        text = "" if speed is None else f"{speed:.3g} steps/s"
        self._progress.update(self._task, completed=step, speed=text)

    def close(self) -> None:
        """Give the terminal back."""
        self._progress.stop()


def observer_for(display: Display, done: int, steps: int) -> Lines | ProgressBar | None:
    """Return the display of a run of `steps` steps, of which `done` have ended; None for `QUIET`."""
    if display is Display.QUIET:
        return None
    return (
        ProgressBar(done, steps)
        if display is Display.BAR
        else Lines(steps, verbose=display is Display.VERBOSE)
    )


def _text(row: Tree, steps: int) -> str:
    text = f"epoch {row['epoch']}  step {row['step']}/{steps}  training loss {row['train_loss']:.4f}"
    if row.get("valid_loss") is not None:
        text += f"  validation {text_of_metrics(row)}"
    return f"{text}  ({row['seconds']:.1f} s)"


def _costs(row: TreeView, before: TreeView) -> str:
    """Return steps per second, bytes per step and the share of waiting since the row before, as text."""
    steps, seconds, sent = (row[key] - before.get(key, 0) for key in ("step", "seconds", "bytes_sent"))
    texts = [f"{steps / seconds:.3g} steps/s"] if seconds > 0 else []
    texts += [f"{sent / steps / 1e3:,.4g} kB/step sent"] if steps else []
    texts += [f"{100 * row['wait_share']:.0f} % waited"] if row["wait_share"] is not None else []
    return f"  {', '.join(texts)}"


def text_of_metrics(values: TreeView) -> str:
    """Return the loss and the metrics on held-out samples that are numbers, as text."""
    found = {
        short.replace("_", " "): value
        for name, value in values.items()
        if (short := held_out(name)) and is_number(value)
    }
    texts = [
        f"{n} {100 * value:.2f} %" if n == "accuracy" else f"{n} {value:.4f}" for n, value in found.items()
    ]
    return ", ".join(texts)
