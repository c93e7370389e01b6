"""The answer of `hocket recommend`: a table, the command to try first, and on request explanations or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
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
#: Columns within which the answer takes 15 lines, and those of a strategy's name.
_NARROW, _NAME = 80, 30
_HEADERS = ("", "strategy", "step", "faster", "against sgd", "sent/step")


def show_advice(advice: Advice, rows: Sequence[AdvisedStrategy], absent: int) -> None:
    """Print the situation, the table, the command to try first, and the predictions' error.

    Args:
        advice: the advice.
        rows: the rows of the table.
        absent: number of packages with recipes that are not installed.
    """
    settings, plain, best = advice.situation.settings, advice.plain, advice.best
    costs = advice.situation.plan(plain.strategy)
    link = f", {format_bits_per_second(settings.network.bandwidth_bits_per_s)}"
    late = "" if settings.delays is None else f"; late ranks: {title(settings.delays)}"
    head = (
        f"{ranks_of(settings, advice.situation.placement)}{' on one host' if advice.on_one_host else link}, "
        f"{format_count(costs.num_parameters)} parameters ({format_bytes(costs.model_bytes)}), "
        f"{format_seconds(settings.compute.step_s)} of computing{late}"
    )
    step_s = plain.prediction.step_s
    waits = (plain.prediction.exposed_s + plain.prediction.held_up_s) / step_s
    takes = f"Plain allreduce (DDP) is predicted to take {format_seconds(step_s)} a step, {waits:.0%} of it waiting."
    say([head, takes], bullet="")
    print()
    show_table(_HEADERS, [_cells(advice, row) for row in rows], numbers=_HEADERS[2:], drawn=False)
    if len(head) <= _NARROW:  # else the lines above are one more
        print()
    if best is plain:
        print(f"Plain allreduce (agd, DDP) is best here: nothing measured is {CLOSE - 1:.0%} faster.")
    else:
        strategies = f"strategy=agd,{best.spelled}"
        say_command("Try first: ", f"hocket sweep --script train.py -n {advice.situation.ranks}", strategies)
        print("Costs were measured from scratch; synchronous_steps=N lowers DiLoCo's.")
    left_out = "" if any(row.prediction.packing_s for row in rows) else ", compressing left out"
    missing = f"; not installed: {absent} packages (hocket plugins)" if absent else ""
    error = f"Predicted within {ERROR} x{left_out}{_level(advice, best)}."
    say([error, f"More: --explain, --all, --json{missing}"], bullet="")


def _cells(advice: Advice, row: AdvisedStrategy) -> tuple[str, ...]:
    loss, accuracy = row.about.loss_percent, row.about.accuracy_points
    cost = "not measured" if accuracy is None else f"accuracy {accuracy:+.1f}"
    if loss is not None and not (advice.by_accuracy and accuracy is not None):
        cost = f"loss {loss:+.1f} %"
    return (
        "*" if row is advice.best else "",
        textwrap.fill(row.name, _NAME, subsequent_indent="  ", break_on_hyphens=False),
        format_seconds(row.prediction.step_s),
        f"{advice.faster(row):,.1f} x",
        "same" if is_exact(row.about) else cost,
        format_bytes(row.prediction.bytes_per_step),
    )


def _level(advice: Advice, row: AdvisedStrategy) -> str:
    """Return the bandwidth from which plain allreduce is as fast as a row; empty on one host."""
    if row is advice.plain or advice.on_one_host:
        return ""
    level = advice.least_bandwidth(row)
    bandwidths = "on no network" if level is None else f"from {format_bits_per_second(level)}"
    return f"; DDP is as fast {bandwidths}"


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
        costs = row.prediction
        parts = {"waits": costs.exposed_s, "is held up": costs.held_up_s, "compresses": costs.packing_s}
        times = ", ".join(f"{what} for {format_seconds(time)}" for what, time in parts.items() if time)
        memory = f"a step {times or 'only computes'}; buffers take {format_bytes(costs.memory_bytes)}"
        print(f"\n{row.name}")
        say([*_notes(row), memory + _level(advice, row)], bullet="  - ")
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
