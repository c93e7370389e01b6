"""The picture of a run: loss, metrics, bytes, waits and the replicas' distance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.pictures import new_figure
from hocket.results import VALID
from hocket.results.history import Point, Row, metric_names, points, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_SENT = "MB sent, mean of ranks"
_WAITED = "time waited for others, %"
_DISTANCE = "consensus distance"
_FROM_ZERO = (_SENT, _WAITED, _DISTANCE)


def draw(metrics: Path, picture: Path, title: str) -> bool:
    """Draw a run's metrics (JSON lines) as PNG; return False where matplotlib is not installed."""
    rows = read_rows(metrics)
    panels = _panels(rows)
    num_rows = -(-len(panels) // _COLUMNS)
    figure = new_figure(12, 3.5 * num_rows)
    if figure is None:
        return False
    figure.suptitle(title)
    for place, (label, fill) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(num_rows, min(_COLUMNS, len(panels)), place)
        fill(axes)
        axes.set(xlabel="step", ylabel=label)
        axes.set_xlim(left=0)
        if label in _FROM_ZERO:
            axes.set_ylim(bottom=0)
        if len(axes.get_lines()) > 1:
            axes.legend()
    figure.savefig(picture, dpi=120)
    return True


def _panels(rows: Sequence[Row]) -> dict[str, Callable[[Axes], None]]:
    """Return the content of each panel, by its label; empty panels are left out."""
    panels: dict[str, Callable[[Axes], None]] = {"loss": lambda axes: _draw_losses(axes, rows)}
    for name in metric_names(rows)[1:]:
        found = points(rows, name)
        panels[f"validation {name.removeprefix(VALID)}"] = lambda axes, found=found: _line(axes, found, "o-")  # type: ignore[misc]
    sent, waits = points(rows, "bytes_sent"), points(rows, "wait_share")
    if any(value for _, value in sent):
        panels[_SENT] = lambda axes: _line(axes, sent, scale=1e-6)
    if any(value for _, value in waits):
        panels[_WAITED] = lambda axes: _draw_waits(axes, rows)
    distances = points(rows, "consensus_distance")
    if any(value for _, value in distances):
        panels[_DISTANCE] = lambda axes: _line(axes, distances, "o-")
    return panels


def _draw_losses(axes: Axes, rows: Sequence[Row]) -> None:
    _line(axes, points(rows, "train_loss"), label="training")
    _line(axes, points(rows, "valid_loss"), "o-", label="validation")


def _draw_waits(axes: Axes, rows: Sequence[Row]) -> None:
    _line(axes, points(rows, "wait_share"), label="mean of ranks", scale=100)
    for end, style in (("min", ":"), ("max", "--")):
        _line(axes, points(rows, f"wait_share_{end}"), style, label=f"{end} of ranks", scale=100)


def _line(
    axes: Axes, found: Sequence[Point], style: str = "-", *, label: str | None = None, scale: float = 1.0
) -> None:
    steps, values = [row["step"] for row, _ in found], [value * scale for _, value in found]
    axes.plot(steps, values, style, label=label, markersize=4)
