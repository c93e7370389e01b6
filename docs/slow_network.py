"""Draw the README's figure: steps on a slow network, from the table that packages/diloco/README.md has of them.

python docs/slow_network.py      # writes docs/slow_network.png
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
TABLE = DOCS.parent / "packages/diloco/README.md"
COMPUTING_MS = 500


def rows() -> dict[str, float]:
    """Return milliseconds a step by strategy, of the section `On a slow network`."""
    section = TABLE.read_text().split("## On a slow network")[1].split("\n## ")[0]
    return {name: float(ms) for name, ms in re.findall(r"^\| (.+?) \| (\d+) \|", section, re.MULTILINE)}


def main() -> None:
    found = rows()
    names = [name.replace("`", "") for name in found]
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    axes.barh(names, COMPUTING_MS, color="#2f6db5", label="computing")
    waits = [max(0.0, ms - COMPUTING_MS) for ms in found.values()]
    axes.barh(names, waits, left=COMPUTING_MS, color="#d98c5f", label="waiting for the network")
    for place, ms in enumerate(found.values()):
        axes.text(ms + 20, place, f"{ms:,.0f} ms", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(found.values()))
    axes.set_xlabel("milliseconds a step")
    axes.set_title("4 hosts, 100 Mbit/s, 3 M parameters", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(DOCS / "slow_network.png", dpi=120)


if __name__ == "__main__":
    main()
