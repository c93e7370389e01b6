"""The output of `hocket recommend`: a table, the costs of each strategy, and the assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.cli.plan_text import ASSUMED_OVERLAP, title
from hocket.cli.printing import say
from hocket.cli.recommend.candidates import NOTHING, CandidateStrategy
from hocket.cli.recommend.options import Asked
from hocket.cli.recommend.predictions import Predictions
from hocket.cli.table import show_table
from hocket.installing import how_to_install
from hocket.plan.advice import CLOSE, PLAIN, least_bandwidth, most_hosts
from hocket.plan.links import WITHIN_A_HOST
from hocket.plan.models import MATRICES
from hocket.plugin.discovery import KNOWN_WORDS, TASKS
from hocket.quantities import format_bytes, format_seconds
from hocket.strategy.compose import SYNCHRONOUS_RECIPE
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig

if TYPE_CHECKING:
    from hocket.delays import Delays
    from hocket.plan.plan import Plan

__all__ = ["absent", "assumptions", "show_costs", "show_head", "show_table_of"]

#: The numbers of hosts among which plain allreduce is compared.
_HOSTS = tuple(2**power for power in range(1, 8))
_MOST_RANKS = 128
_UNKNOWN = "not measured"


def show_head(
    base: RunConfig, placement: Placement, planned: Plan, step_s: float, delays: Delays | None
) -> None:
    hosts = len(set(placement.hosts))
    speed = base.network.bandwidth_bits_per_s
    late = "" if delays is None else f"; late ranks: {title(delays)}"
    say(
        [
            f"{placement.size} ranks on {hosts} host{'s' * (hosts > 1)}, {speed / 1e9:.3g} Gbit/s per host, latency "
            f"{format_seconds(base.network.latency_s)}; {planned.num_parameters:,} parameters, "
            f"{format_bytes(planned.model_bytes)}; a step computes {format_seconds(step_s)}{late}"
        ],
        bullet="",
    )
    print()


def show_table_of(
    predictions: Predictions,
    where: Placement,
    bandwidth: float,
    delays: Delays | None,
    *,
    packing: bool,
) -> list[CandidateStrategy]:
    """Print the table for links of `bandwidth` bits per second, and return its rows' candidates in order."""
    times = {name: predictions.as_tested(name, where, bandwidth) or 0.0 for name in predictions.candidates}
    shown = sorted(  # plain allreduce before strategies of the same time in three digits
        predictions.candidates.values(),
        key=lambda each: (
            not each.loses_nothing,
            not each.test,
            float(f"{times[each.name]:.3g}"),
            each.name != PLAIN,
        ),
    )
    tests = _tests(shown)
    tested = any(each.has_start for each in shown)
    per_host = where.size // len(set(where.hosts))
    hosts = [
        number
        for number in _HOSTS
        if number * per_host <= _MOST_RANKS and (delays is None or _fits(delays, number * per_host))
    ]
    headers = (
        "strategy",
        "step",
        *(("as tested",) * tested),
        "waiting",
        *(("held up",) * (delays is not None)),
        "sent per step",
        "memory",
        *(("compressing",) * packing),
        f"{PLAIN} is level from",
        "and up to",
        "costs",
    )
    rows = []
    for each in shown:
        found = predictions.of(each.name, where, bandwidth)
        assert found is not None
        rows.append(
            (
                each.name,
                format_seconds(found.step_s),
                *((format_seconds(times[each.name]) if each.has_start else "",) * tested),
                format_seconds(found.exposed_s),
                *((format_seconds(found.held_up_s),) * (delays is not None)),
                format_bytes(found.bytes_per_step),
                format_bytes(found.memory_bytes),
                *((format_seconds(found.packing_s),) * packing),
                *_level(predictions, each.name, where, bandwidth, hosts),
                NOTHING if each.loses_nothing else tests.get(each.test, _UNKNOWN),
            )
        )
    show_table(headers, rows, numbers=headers[1:-1])
    print()
    return shown


def _level(
    predictions: Predictions, name: str, where: Placement, bandwidth: float, hosts: Sequence[int]
) -> tuple[str, str]:
    """Return the bandwidth from which, and the hosts up to which, plain allreduce is level with a candidate."""
    from hocket.plan.utilisation import BANDWIDTHS

    if name == PLAIN:
        return "", ""
    per_host = where.size // len(set(where.hosts))
    least = least_bandwidth(lambda each: predictions.is_level(name, where, each))
    most = most_hosts(
        lambda number: predictions.is_level(name, Placement.of_counts([per_host] * number), bandwidth), hosts
    )
    lowest = "" if least is None else f"{least / 1e9:.3g} Gbit/s{' or less' * (least == BANDWIDTHS[0])}"
    reached = "" if most is None else f"{most} hosts{' or more' * (most == hosts[-1])}"
    return lowest or "never", reached or "never"


def _tests(shown: Sequence[CandidateStrategy]) -> dict[str, str]:
    """Return letters for the tests that measured accuracy, in the order of the table."""
    tests = dict.fromkeys(each.test for each in shown if each.test and not each.loses_nothing)
    return {test: chr(ord("a") + place) for place, test in enumerate(tests)}


def _fits(delays: Delays, ranks: int) -> bool:
    try:
        delays.check_size(ranks)
    except ValueError:
        return False
    return True


def show_costs(shown: Sequence[CandidateStrategy]) -> None:
    print("Changes, and what they cost in accuracy; figures of different tests cannot be compared.\n")
    groups = {
        f"{NOTHING}: the mean of all gradients": [each for each in shown if each.loses_nothing],
        **{
            f"{letter}: {test}": [each for each in shown if each.test == test and not each.loses_nothing]
            for test, letter in _tests(shown).items()
        },
        f"{_UNKNOWN}": [each for each in shown if not (each.loses_nothing or each.test)],
    }
    for heading, members in groups.items():
        if members:
            say([heading], bullet="")
            say([_cost(each) for each in members], bullet="  - ")


def _cost(each: CandidateStrategy) -> str:
    recipe = each.recipe
    if recipe is not None:
        measured = f"; measured: {recipe.accuracy}" if each.test and not each.loses_nothing else ""
        other = "" if each.name == recipe.name else f"as {recipe.name}: "
        return f"{each.name}: {other}{recipe.changes or 'see its paper'}{measured}"
    parts = [f"set {each.override}"] if each.override else []
    if each.base is not None and each.base.changes:
        parts.append(f"the recipe that it is based on: {each.base.changes}")
    if each.base is not None and each.base.measured_on:
        parts.append(f"measured of that: {each.base.accuracy} ({each.base.measured_on})")
    return f"{each.name}: {'; '.join(parts) or 'your own'}"


def absent(installed: Sequence[str]) -> list[str]:
    """Return a line on packages with recipes that are not installed, and the commands that install them."""
    absent = [f"hocket-{word}" for word in KNOWN_WORDS if word not in installed and word != TASKS]
    commands = "; ".join(how_to_install(package) for package in absent)
    return [f"Recipes of {', '.join(absent)} are not installed: {commands}"] if absent else []


def assumptions(
    asked: Asked, where: Placement, delays: Delays | None, shown: Sequence[CandidateStrategy]
) -> list[str]:
    margin = f"{100 * (CLOSE - 1):.0f} %"
    average = ", as tested where that is given" if any(each.has_start for each in shown) else ""
    lines = [
        "Predicted, not measured: exchanges take the time that `hocket plan` shows, one at a time. "
        f"{ASSUMED_OVERLAP} A fast step is worth nothing by itself: compare what strategies reach in the same time "
        "(`hocket sweep`, `hocket compare`).",
        "Known error: on 4 hosts at 100 Mbit/s and 1 Gbit/s at most a factor of 1.3, for eager.solo 1.6; on 8 ranks "
        "that shared two cores 2.4 for eager.solo, 1.7 for sgp and 1.4 for redsync (docs/choosing.md).",
        f"Order: strategies that change nothing, then those whose accuracy was measured; each by step time{average}.",
    ]
    if where.size > len(set(where.hosts)):
        lines.append(
            "Several ranks on a host share its link: a collective crosses it once, gossip with each message that "
            "leaves the host. Messages within a host pass through memory, at "
            f"{WITHIN_A_HOST.bandwidth_bits_per_s / 1e9:.0f} Gbit/s."
        )
    if any(each.synchronous_fraction for each in shown):
        fractions = {each.test: each.synchronous_fraction for each in shown if each.synchronous_fraction}
        begun = ", ".join(
            f"{fractions[test]:.0%} in {of}" for test, of in _tests(shown).items() if test in fractions
        )
        lines.append(
            f"As tested: accuracy was measured in runs that begin with steps of {SYNCHRONOUS_RECIPE} ({begun}); this "
            "is the mean step of such a run. Set synchronous_steps to that share of your steps."
        )
    for each in shown:
        if each.start:
            share = sum(fraction for fraction, _ in each.start)
            lines.append(
                f"As tested, {each.name}: the mean step, with the {share:.0%} of steps before this phase."
            )
        elif each.strategy != each.run.strategy and each.run.strategy.phases and each.run.steps is None:
            lines.append(f"{each.name}: give steps=N to see the mean step over all its phases.")
    lines += [
        f"{PLAIN} is level: the bandwidth per host from which, and the number of such hosts on this network up to "
        f"which, plain allreduce takes at most {margin} longer (than as tested, where that is given).",
        "Memory: send and receive buffers, and the states of compressors and outer optimizers. Parameters that are "
        "sent in place need none.",
    ]
    if asked.params is not None:
        lines.append(
            f"The model is assumed to be {MATRICES} equal matrices; --model or task= gives the real one."
        )
    if not asked.measure:
        lines.append(
            "The time that compressors compute is not counted: --measure measures it on this machine."
        )
    if delays is not None:
        lines.append(
            "Held up: by late ranks, a rank's own delays included; ranks with partial collectives do not wait."
        )
    if not asked.all:
        lines.append("--all includes recipes whose accuracy has not been measured.")
    return lines
