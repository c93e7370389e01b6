"""Draw what a strategy does to training: when one rank computes, when it waits, and when messages are under way.

    sudo tools/netlab --hosts 4 --rate 100mbit run --env -- .venv/bin/python docs/step_timeline.py
    .venv/bin/python docs/step_timeline.py      # on four virtual ranks, with a simulated network

Writes docs/step_timeline.png, from what an observer records of each strategy. The model is that of
packages/diloco/benchmarks/utilisation.py: 3 M parameters in 24 layers, which compute for 500 ms a step.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import hocket
from hocket.pictures import new_figure
from hocket.trace.observer import ExchangeEvent

DOCS = Path(__file__).resolve().parent
PACKAGES = DOCS.parent / "packages"
sys.path += [str(PACKAGES / "diloco/benchmarks"), str(PACKAGES / "gossipgrad/benchmarks")]

from emulated import measure  # noqa: E402 (found in the packages' benchmarks)
from utilisation import MACHINE, NETWORK, PERIOD, SIDES  # noqa: E402

#: Each strategy of the picture: a title, what it is composed of, and a number of steps that fills the time shown.
SHOWN = {
    "agd: averages in every step, as DDP does": (
        ("agd", "gradients.0.collective={name: allreduce, algorithm: ring}"),
        12,
    ),
    f"diloco: combines models every {PERIOD} steps": (SIDES["diloco"], 2 * PERIOD + 8),
    "diloco.streaming: the same in parts, during the next step": (SIDES["diloco.streaming"], 2 * PERIOD + 8),
}
SECONDS = 16.0
COMPUTING, WAITING, SENDING = "#2f6db5", "#d98c5f", "#9aa5b1"

#: The beginning and the end of something, in seconds.
Interval = tuple[float, float]


class Timeline(hocket.Observer):
    """The times of a session on one rank.

    Attributes:
        ends: the ends of its steps.
        waits: the waits for exchanges.
        exchanges: the exchanges under way.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.waits: list[Interval] = []
        self.exchanges: list[Interval] = []

    def step_ended(self, step: int, end_s: float) -> None:
        self.ends.append(end_s)

    def waited(self, exchange: ExchangeEvent, start_s: float, end_s: float) -> None:
        self.waits.append((start_s, end_s))

    def complete(self, exchange: ExchangeEvent) -> None:
        assert exchange.end_s is not None
        self.exchanges.append((exchange.start_s, exchange.end_s))

    def shown(self) -> tuple[list[Interval], list[Interval], list[Interval]]:
        """Return steps, waits and exchanges, counted from the end of the second step.

        The first steps hold what `attach` costs.
        """
        start = self.ends[1]
        of_all = list(pairwise(self.ends)), self.waits, self.exchanges
        steps, waits, exchanges = ([(first - start, last - start) for first, last in each] for each in of_all)
        return steps, waits, exchanges


def timeline_of(strategy: tuple[str, ...], steps: int) -> Timeline:
    """Train on all ranks, and return rank 0's timeline."""

    def train() -> Timeline:
        timeline = Timeline()
        measure(hocket.join(), MACHINE, strategy, steps, timeline)
        return timeline

    return hocket.virtual(4, network=NETWORK).run(train)[0] if hocket.join().size == 1 else train()


def bars(axes: Any, row: float, height: float, found: list[Interval], color: str, **look: Any) -> None:
    """Draw intervals side by side, cut to the time shown."""
    cut = [(max(0.0, first), min(SECONDS, last)) for first, last in found if last > 0 and first < SECONDS]
    axes.broken_barh([(first, last - first) for first, last in cut], (row, height), facecolor=color, **look)


def draw(found: dict[str, Timeline], file: Path) -> None:
    """Draw a pair of rows for each strategy: the rank's time, and below it the exchanges under way."""
    figure = new_figure(8, 3.6)
    assert figure is not None
    axes = figure.subplots()
    for number, (title, timeline) in enumerate(found.items()):
        row, (steps, waits, exchanges) = -2.2 * number, timeline.shown()
        bars(axes, row, 0.8, steps, COMPUTING, edgecolor="white", linewidth=0.8)
        bars(axes, row, 0.8, waits, WAITING)
        bars(axes, row - 0.28, 0.22, exchanges, SENDING)
        ended = sum(0 < last <= SECONDS for _, last in steps)
        axes.text(0, row + 0.92, title, fontsize=9.5, fontweight="bold")
        axes.text(SECONDS, row + 0.92, f"{ended} steps", fontsize=9.5, ha="right")
    for color, label in (
        (COMPUTING, "computing"),
        (WAITING, "waiting for messages"),
        (SENDING, "messages under way"),
    ):
        axes.broken_barh([(-2, 0)], (0, 0), facecolor=color, label=label)
    axes.set(xlim=(0, SECONDS), ylim=(-2.2 * (len(found) - 1) - 0.5, 1.5), xlabel="seconds", yticks=[])
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=120)


def main() -> None:
    found = {title: timeline_of(*asked) for title, asked in SHOWN.items()}
    if hocket.join().rank == 0:
        draw(found, DOCS / "step_timeline.png")


if __name__ == "__main__":
    main()
