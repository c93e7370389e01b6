"""The answer of `hocket recommend`: a table, the command to try first, and on request explanations or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from hocket.cli.plan_text import ASSUMED_OVERLAP, assumptions, ranks_of, title
from hocket.cli.printing import say, say_command
from hocket.cli.table import show_table
from hocket.plan.advice import CLOSE, ERROR, Advice, AdvisedStrategy, is_exact
from hocket.quantities import format_bits_per_second, format_bytes, format_count, format_seconds

_ASSUMED = (
    f"Exchanges take the time that `hocket plan` shows, one at a time. {ASSUMED_OVERLAP} Compressing takes none "
    "without --measure. Ranks wait for late ones, except in partial collectives (eager).",
    "* marks, among the strategies predicted about as fast as the fastest, the one with the lowest "
    "measured cost. Costs were measured on other models (docs/atlas): measure yours with `hocket sweep` "
    "and `hocket compare`.",
)
#: Columns within which the answer takes 15 lines.
_NARROW = 80
_HEADERS = ("", "strategy", "step", "faster", "loss", "accuracy", "sent a step")


def show_advice(advice: Advice, rows: Sequence[AdvisedStrategy], absent: int) -> None:
    """Print the situation, the table, the command to try first, and the predictions' error.

    Args:
        advice: the advice.
        rows: the rows of the table.
        absent: number of packages with recipes that are not installed.
    """
    head = [*_head(advice)]
    say(head, bullet="")
    print()
    show_table(_HEADERS, [_cells(advice, row) for row in rows], numbers=_HEADERS[2:])
    if len(head[0]) <= _NARROW:  # else the lines above are one more
        print()
    error = f"Known error {ERROR} x{'' if advice.packs else ', compressing left out'}"
    below = [f"{error}; DDP is as fast {_level(advice, advice.best)}."]
    if advice.best is advice.plain:
        best = f"Plain allreduce (agd, DDP) is best here: nothing measured is {CLOSE - 1:.0%} faster."
        below = [best, f"{error}."]
    else:
        strategies = f"strategy=agd,{advice.best.spelled}"
        say_command("Try first: ", f"hocket sweep --script train.py -n {advice.situation.ranks}", strategies)
    if any(row.about.loss_percent is not None for row in rows):
        outer = any(each.outer for row in rows for each in row.strategy.exchanges)
        helps = "; synchronous_steps=N helps DiLoCo" if outer else " (docs/atlas)"
        below.append(f"Loss and accuracy: from scratch, against sgd{helps}.")
    missing = f"; not installed: {absent} packages (hocket plugins)" if absent else ""
    say([*below, f"More: --explain, --all, --json{missing}"], bullet="")


def _head(advice: Advice) -> Iterator[str]:
    settings, plain = advice.situation.settings, advice.plain.prediction
    costs, network = advice.situation.plan(advice.plain.strategy), settings.network
    late = "" if settings.delays is None else f"; late ranks: {title(settings.delays)}"
    yield (
        f"{ranks_of(settings, advice.situation.placement)}, {format_bits_per_second(network.bandwidth_bits_per_s)}, "
        f"{format_count(costs.num_parameters)} parameters ({format_bytes(costs.model_bytes)}), "
        f"{format_seconds(settings.compute.step_s)} of computing{late}"
    )
    waits = (plain.exposed_s + plain.held_up_s) / plain.step_s
    step = format_seconds(plain.step_s)
    yield f"Plain allreduce (DDP) is predicted to take {step} a step, {waits:.0%} of it waiting."


def _cells(advice: Advice, row: AdvisedStrategy) -> tuple[str, ...]:
    faster, about = advice.faster(row), row.about
    costs = {" %": about.loss_percent, " pts": about.accuracy_points}
    return (
        "*" if row is advice.best else "",
        row.name,
        format_seconds(row.prediction.step_s),
        f"{faster:.0f} x" if faster >= 10 else f"{faster:.1f} x",
        *(
            "same" if is_exact(about) else "?" if cost is None else f"{cost:+.1f}{unit}"
            for unit, cost in costs.items()
        ),
        format_bytes(row.prediction.bytes_per_step),
    )


def _level(advice: Advice, row: AdvisedStrategy) -> str:
    """Return the bandwidth from which plain allreduce is as fast as a row, as text."""
    level = advice.least_bandwidth(row)
    return "on no network" if level is None else f"from {format_bits_per_second(level)} on"


def _notes(row: AdvisedStrategy) -> list[str]:
    """Return what a row changes, and the cost in other tests."""
    about = row.about
    elsewhere = f"elsewhere: {about.accuracy}; {about.measured_on}" if about.accuracy else ""
    return [note for note in (about.changes, elsewhere) if note]


def show_explanation(advice: Advice, rows: Sequence[AdvisedStrategy], left: Mapping[str, str]) -> None:
    """Print what the rows change, what that cost in which test, and what predictions assume.

    Args:
        advice, rows: as of `show_advice`.
        left: reasons by the names of strategies that are left out.
    """
    for row in rows:
        costs, level = (
            row.prediction,
            "" if row is advice.plain else f"; agd is as fast {_level(advice, row)}",
        )
        parts = {"waits": costs.exposed_s, "is held up": costs.held_up_s, "compresses": costs.packing_s}
        times = ", ".join(f"{what} for {format_seconds(time)}" for what, time in parts.items() if time)
        print(f"\n{row.name}")
        say(
            [*_notes(row), f"a step {times}; buffers take {format_bytes(costs.memory_bytes)}{level}"],
            bullet="  - ",
        )
    print("\nLeft out:")
    say(f"{name}: {why}" for name, why in left.items())
    print("\nAssumed:")
    situation = advice.situation
    say(_ASSUMED)
    say(assumptions(situation.settings, situation.placement, situation.plan(advice.best.strategy)))


def as_json(advice: Advice, left: Mapping[str, str]) -> dict[str, object]:
    """Return all rows, the best one and the reasons of strategies that are left out, as data."""
    rows = [
        {
            "strategy": row.name,
            **asdict(row.prediction),
            "faster": advice.faster(row),
            "same_result": is_exact(row.about),
            "loss_percent": row.about.loss_percent,
            "accuracy_points": row.about.accuracy_points,
            "notes": _notes(row),
        }
        for row in advice.rows
    ]
    return {
        "compute_s": advice.situation.settings.compute.step_s,
        "best": advice.best.name,
        "best_is_level_from_bits_per_s": advice.least_bandwidth(advice.best),
        "strategies": rows,
        "left_out": left,
    }
