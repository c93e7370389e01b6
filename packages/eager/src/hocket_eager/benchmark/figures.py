"""The table of the partial allreduces' benchmark, with the figures of the paper's figures 8 and 9."""

from __future__ import annotations

from hocket.api import plain


def table(found: plain.Tree) -> str:
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
