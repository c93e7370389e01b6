"""`hocket recommend`: the strategies to try first, by predicted step and measured cost; no rank is started."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.click_parts import Command, add_options
from hocket.cli.network_options import network_options
from hocket.cli.printing import say
from hocket.cli.rank_options import island_option
from hocket.cli.table import show_table
from hocket.quantities import format_bits_per_second, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from hocket.plan.advice import Advice, AdviceRow, TrainingSituation

__all__ = ["recommend_command", "recommend_options"]

#: The rows of the table without `--all`.
_ROWS = 5
_UNKNOWN = "?"
_HEADERS = ("", "strategy", "step", "faster", "loss", "accuracy", "sent a step")

_OPTIONS = (
    click.argument("words", nargs=-1, metavar="[RECIPE|FILE.yaml|RUN] [KEY=VALUE]..."),
    network_options,
    click.option("--hosts", metavar="a:8,b:8|4x8|FILE", help="Hosts of the ranks."),
    island_option,
    click.option("-n", "-np", "--np", "ranks", hidden=True),
    click.option("--step", metavar="200ms", help="Time that a step computes."),
    click.option(
        "--late",
        metavar="1x300ms[@10%]",
        help="Late ranks: 1 rank, drawn anew in each step (or in 10 % of them), by 300 ms.",
    ),
    click.option(
        "--optimizer", metavar="NAME", help="Optimizer of all strategies; default: each recipe's own."
    ),
    click.option(
        "--measure",
        is_flag=True,
        help="Measure the time of compressing, and of a task's step, on this machine.",
    ),
    click.option("--all", is_flag=True, help="Show all recipes, those of unmeasured cost included."),
    click.option(
        "--explain",
        is_flag=True,
        help="Say of each row what it changes, what that cost in which test, and what is assumed.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON."),
)


def recommend_options(command: Command) -> Command:
    """Add these options to a command, which gets the run, its overrides and the options."""

    @wraps(command)
    def with_options(words: tuple[str, ...], ranks: str | None, **options: Any) -> object:
        if ranks is not None:
            raise click.UsageError(
                f"-n: name the ranks' hosts instead: --hosts {ranks}x1 for {ranks} hosts of one rank, --hosts "
                f"1x{ranks} for one host"
            )
        targets = [word for word in words if "=" not in word or os.path.exists(word)]
        if len(targets) > 1:
            raise click.UsageError(f"Got {len(targets)} runs: name one, or none.")
        overrides = [word for word in words if word not in targets]
        return command(targets[0] if targets else None, overrides, **options)

    return add_options(with_options, _OPTIONS)


def recommend_command(
    target: str | None, overrides: Sequence[str], explain: bool, as_json: bool, **options: Any
) -> None:
    """Carry out `hocket recommend`.

    Args:
        target: a recipe, or a run's file or folder; None for the defaults.
        overrides: overrides of the run.
        explain, as_json: print more, or all as JSON.
        options: the other options, by the names of `Asked`'s fields.

    Raises:
        UserError: a wrong argument or option.
    """
    from hocket.cli.situation import Asked
    from hocket.plan.advice import Advice
    from hocket.plugin import default_registry

    registry = default_registry()
    asked = Asked(registry, target, overrides, **options)
    situation = asked.situation()
    candidates, left = asked.candidates(situation)
    advice = Advice.of(situation, candidates)
    if as_json:
        print(json.dumps(_as_json(advice, left), indent=1))
        return
    rows = [*advice.rows] if asked.all else advice.shown(_ROWS)
    _show_head(advice)
    _show_table(advice, rows)
    if situation.delays is None:  # else the lines above are one more
        print()
    say(_advised(advice), bullet="")
    say(_footnotes(rows, asked.absent), bullet="")
    if explain:
        _explain(advice, rows, {**left, **dict.fromkeys(asked.absent, "not installed")})


def _show_head(advice: Advice) -> None:
    situation, plain = advice.situation, advice.plain.prediction
    costs = situation.plan(advice.plain.candidate.strategy)
    waits = (plain.exposed_s + plain.held_up_s) / plain.step_s
    say(
        [
            f"{_hosts(situation)}, {format_bits_per_second(situation.network.bandwidth_bits_per_s)}, "
            f"{format_count(costs.num_parameters)} parameters ({format_bytes(costs.model_bytes)}), a step computes "
            f"{format_seconds(situation.step_s)}{_late(situation)}",
            f"Plain allreduce (DDP) is predicted to take {format_seconds(plain.step_s)} a step, {waits:.0%} of it "
            "waiting.",
        ],
        bullet="",
    )
    print()


def _hosts(situation: TrainingSituation) -> str:
    hosts, ranks = len(set(situation.placement.hosts)), situation.ranks
    if ranks % hosts:
        return f"{situation.island.count(ranks)} on {hosts} hosts"
    return f"{hosts} host{'s' * (hosts > 1)} x {situation.island.count(ranks // hosts)}"


def _late(situation: TrainingSituation) -> str:
    from hocket.cli.plan_text import title

    return "" if situation.delays is None else f"; late ranks: {title(situation.delays)}"


def _show_table(advice: Advice, rows: Iterable[AdviceRow]) -> None:
    cells = [
        (
            "*" if row is advice.best else "",
            row.candidate.name,
            format_seconds(row.prediction.step_s),
            f"{row.faster:.0f} x" if row.faster >= 10 else f"{row.faster:.1f} x",
            *_costs(row),
            format_bytes(row.prediction.bytes_per_step),
        )
        for row in rows
    ]
    show_table(_HEADERS, cells, numbers=_HEADERS[2:])


def _costs(row: AdviceRow) -> tuple[str, str]:
    """Return the measured loss and accuracy against synchronous SGD."""
    candidate = row.candidate
    if candidate.is_exact:
        return "same", "same"
    loss, accuracy = candidate.loss_percent, candidate.accuracy_points
    return (
        _UNKNOWN if loss is None else f"{loss:+.1f} %",
        _UNKNOWN if accuracy is None else f"{accuracy:+.1f} pts",
    )


def _advised(advice: Advice) -> Iterator[str]:
    """Yield the command to try first, or that plain allreduce is best; then the predictions' error."""
    from hocket.plan.advice import CLOSE, ERROR

    left_out = "" if advice.situation.packs else ", compressing left out"
    error = f"Known error {ERROR} x{left_out}"
    if advice.best is advice.plain:
        yield f"Plain allreduce (agd, DDP) is best here: nothing measured is {CLOSE - 1:.0%} faster."
        yield f"{error}."
        return
    strategies = shlex.quote(f"strategy=agd,{advice.best.candidate.spelled}")
    yield f"Try first: hocket sweep --script train.py {strategies} -n {advice.situation.ranks}"
    level = advice.least_bandwidth(advice.best)
    yield f"{error}; DDP is as fast " + (
        "on no network." if level is None else f"from {format_bits_per_second(level)} on."
    )


def _footnotes(rows: Sequence[AdviceRow], absent: Sequence[str]) -> Iterator[str]:
    if any(row.candidate.loss_percent is not None for row in rows):
        yield "Loss (AdamW), accuracy (SGD): against sgd, from scratch (docs/atlas)."
    missing = f"; not installed: {len(absent)} packages (hocket plugins)" if absent else ""
    yield f"More: --explain, --all, --json{missing}"


def _explain(advice: Advice, rows: Sequence[AdviceRow], left: Mapping[str, str]) -> None:
    """Print what the rows change, what that cost in which test, and what predictions assume."""
    for row in rows:
        costs, level = row.prediction, advice.least_bandwidth(row)
        print(f"\n{row.candidate.name}")
        waits = f"waits {format_seconds(costs.exposed_s)} of a step"
        if advice.situation.delays is not None:
            waits += f", is held up {format_seconds(costs.held_up_s)} by late ranks"
        if advice.situation.packs:
            waits += f", compresses for {format_seconds(costs.packing_s)}"
        waits += f"; buffers take {format_bytes(costs.memory_bytes)}"
        if row is not advice.plain:
            waits += "; agd is as fast " + (
                "on no network" if level is None else f"from {format_bits_per_second(level)} a host on"
            )
        say([*row.candidate.notes, waits], bullet="  - ")
    if left:
        print("\nLeft out:")
        say([f"{name}: {why}" for name, why in left.items()])
    print("\nAssumed:")
    say(_assumptions(advice.situation))


def _assumptions(situation: TrainingSituation) -> Iterator[str]:
    from hocket.cli.plan_text import ASSUMED_OVERLAP, HOSTS, islands_of

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
        "from scratch on 8 ranks (docs/atlas), or the test that a strategy's row names. DiLoCo and its kin lose less "
        "where the first steps are synchronous (synchronous_steps=N); such steps take as long as plain allreduce."
    )
    if situation.island.ranks > 1:
        yield islands_of(situation.island)
    if situation.placement.size > len(set(situation.placement.hosts)):
        yield HOSTS
    if not situation.packs:
        yield "The time that compressors compute is not counted: --measure measures it on this machine."
    if situation.delays is not None:
        yield "Ranks with partial collectives (eager) do not wait for late ones."


def _as_json(advice: Advice, left: Mapping[str, str]) -> dict[str, object]:
    situation = advice.situation
    rows = [
        {
            "strategy": row.candidate.name,
            **asdict(row.prediction),
            "faster": row.faster,
            "same_result": row.candidate.is_exact,
            "loss_percent": row.candidate.loss_percent,
            "accuracy_points": row.candidate.accuracy_points,
            "notes": row.candidate.notes,
        }
        for row in advice.rows
    ]
    return {
        "compute_s": situation.step_s,
        "best": advice.best.candidate.name,
        "best_is_level_from_bits_per_s": advice.least_bandwidth(advice.best),
        "strategies": rows,
        "left_out": left,
    }
