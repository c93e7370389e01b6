"""The figures of the partial allreduces' benchmark: a table, and a picture like the paper's figures 8 and 9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.api import how_to_install, new_figure

__all__ = ["draw", "table"]


def table(found: dict[str, Any]) -> str:
    """Return the figures in markdown."""
    lines = [
        f"{found['ranks']} ranks on {found['where']}, arriving 1 to {found['ranks']} ms after a common start.",
        "",
        "| bytes | side | mean latency, ms | times below | first to arrive, ms | times below | active ranks |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for nbytes in dict.fromkeys(row["bytes"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["bytes"] == nbytes]
        mean_s, first_s = (
            min((row[key] for row in rows if row["side"] in found["baselines"]), default=float("nan"))
            for key in ("mean_s", "first_s")
        )
        lines += [
            f"| {nbytes} | {row['side']} | {1e3 * row['mean_s']:.3f} | {mean_s / row['mean_s']:.2f} "
            f"| {1e3 * row['first_s']:.3f} | {first_s / row['first_s']:.2f} | {row['active']:.1f} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draw latency and active ranks over sizes; say what is missing where matplotlib is not installed."""
    figure = new_figure(10, 4)
    if figure is None:
        print(f"no picture: {how_to_install('hocket-core', 'plot')}")
        return
    left, right = figure.subplots(1, 2)
    for side in dict.fromkeys(row["side"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["side"] == side]
        sizes = [row["bytes"] for row in rows]
        left.loglog(sizes, [1e3 * row["mean_s"] for row in rows], marker="o", label=side)
        right.semilogx(sizes, [row["active"] for row in rows], marker="o", label=side)
    left.set(xlabel="bytes", ylabel="latency, ms, mean over ranks")
    right.set(xlabel="bytes", ylabel="active ranks, mean over iterations")
    left.legend(fontsize="small")
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")
