"""A picture of a run: loss and accuracy over the steps."""

from __future__ import annotations

import json
from pathlib import Path

from hocket.pictures import new_figure

__all__ = ["plot"]


def plot(metrics: Path, picture: Path, title: str) -> bool:
    """Draw `metrics` (JSON lines) into `picture` (PNG); return False where matplotlib is not installed."""
    figure = new_figure(8, 4.5)
    if figure is None:
        return False
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = figure.add_subplot()
    for key, label, style in (("train_loss", "training loss", "-"), ("valid_loss", "validation loss", "o-")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            losses.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    losses.set(xlabel="step", ylabel="loss", title=title)
    accuracy = [
        (row["step"], 100 * row["valid_accuracy"]) for row in rows if row.get("valid_accuracy") is not None
    ]
    lines = list(losses.get_lines())
    if accuracy:
        right = losses.twinx()
        lines += right.plot(
            *zip(*accuracy, strict=True), "s--", color="tab:green", markersize=4, label="accuracy"
        )
        right.set(ylabel="validation accuracy, %")
    losses.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
    figure.savefig(picture, dpi=120)
    return True
