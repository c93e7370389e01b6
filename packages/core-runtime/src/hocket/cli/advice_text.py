"""The answer of `hocket recommend`: a table, the command to try first, and on request explanations or JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from hocket.cli.plan_text import ASSUMED_OVERLAP, HOSTS, islands_of, title
from hocket.cli.printing import say
from hocket.cli.table import show_table
from hocket.plan.advice import CLOSE, ERROR, Advice, AdvisedStrategy, is_exact
from hocket.quantities import format_bits_per_second, format_bytes, format_count, format_seconds

_HEADERS = ("", "strategy", "step", "faster", "loss", "accuracy", "sent a step")


def show_advice(advice: Advice, rows: Sequence[AdvisedStrategy], absent: int) -> None:
    """Print the situation, the table, the command to try first, and the predictions' error.

    Args:
        advice: the advice.
        rows: the rows of the table.
        absent: number of packages with recipes that are not installed.
    """
    situation = advice.situation
    say(_head(advice), bullet="")
    print()
    show_table(_HEADERS, [_cells(advice, row) for row in rows], numbers=_HEADERS[2:])
    if situation.settings.delays is None:  # else the lines above are one more
        print()
    error = f"Known error {ERROR} x{'' if advice.packs else ', compressing left out'}"
    if advice.best is advice.plain:
        best = f"Plain allreduce (agd, DDP) is best here: nothing measured is {CLOSE - 1:.0%} faster."
    else:
        strategies = shlex.quote(f"strategy=agd,{advice.best.spelled}")
        best = f"Try first: hocket sweep --script train.py {strategies} -n {situation.ranks}"
        error += f"; DDP is as fast {_level(advice, advice.best)}"
    say([best, f"{error}."], bullet="")
    if any(row.about.loss_percent is not None for row in rows):
        say(["Loss (AdamW), accuracy (SGD): against sgd, from scratch (docs/atlas)."], bullet="")
    missing = f"; not installed: {absent} packages (hocket plugins)" if absent else ""
    say([f"More: --explain, --all, --json{missing}"], bullet="")


def _head(advice: Advice) -> Iterator[str]:
    situation, plain = advice.situation, advice.plain.prediction
    settings, costs = situation.settings, situation.plan(advice.plain.strategy)
    hosts, ranks = len(set(situation.placement.hosts)), situation.ranks
    where = f"{settings.island.count(ranks)} on {hosts} hosts"
    if ranks % hosts == 0:
        where = f"{hosts} host{'s' * (hosts > 1)} x {settings.island.count(ranks // hosts)}"
    late = "" if settings.delays is None else f"; late ranks: {title(settings.delays)}"
    yield (
        f"{where}, {format_bits_per_second(settings.network.bandwidth_bits_per_s)}, "
        f"{format_count(costs.num_parameters)} parameters ({format_bytes(costs.model_bytes)}), a step computes "
        f"{format_seconds(settings.compute.step_s)}{late}"
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
        costs = row.prediction
        waits = f"waits {format_seconds(costs.exposed_s)} of a step"
        if advice.situation.settings.delays is not None:
            waits += f", is held up {format_seconds(costs.held_up_s)} by late ranks"
        if advice.packs:
            waits += f", compresses for {format_seconds(costs.packing_s)}"
        waits += f"; buffers take {format_bytes(costs.memory_bytes)}"
        if row is not advice.plain:
            waits += f"; agd is as fast {_level(advice, row)}"
        print(f"\n{row.name}")
        say([*_notes(row), waits], bullet="  - ")
    if left:
        print("\nLeft out:")
        say([f"{name}: {why}" for name, why in left.items()])
    print("\nAssumed:")
    say(_assumptions(advice))


def _assumptions(advice: Advice) -> Iterator[str]:
    situation = advice.situation
    yield f"Exchanges take the time that `hocket plan` shows, one at a time. {ASSUMED_OVERLAP}"
    yield (
        "docs/choosing.md has what predictions were compared with. On four hosts eager.solo was further off; on busy "
        "cores so was what compresses, such as powersgd, by up to 2.3 times."
    )
    yield (
        "* marks the least measured cost among the strategies that predictions cannot tell from the fastest. Tests "
        "differ from your model: compare what strategies reach in the same time (`hocket sweep`, `hocket compare`)."
    )
    yield (
        "Loss is of a transformer on characters with AdamW, accuracy of a CNN on Fashion-MNIST with SGD: 600 steps "
        "from scratch on 8 ranks (docs/atlas), or the test that a strategy's row names. DiLoCo and its kin have a "
        "lower loss where the first steps are synchronous (synchronous_steps=N); those take as long as plain "
        "allreduce."
    )
    if situation.settings.island.ranks > 1:
        yield islands_of(situation.settings.island)
    if situation.placement.size > len(set(situation.placement.hosts)):
        yield HOSTS
    if not advice.packs:
        yield "The time that compressors compute is not counted: --measure measures it on this machine."
    if situation.settings.delays is not None:
        yield "Ranks with partial collectives (eager) do not wait for late ones."


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
