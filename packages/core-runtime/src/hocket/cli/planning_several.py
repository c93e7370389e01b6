"""`hocket plan` of several recipes: a row for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.cli.network_options import GivenModel
from hocket.cli.plan_text import HOSTS, ranks_of, size_of
from hocket.cli.planned import planned_run, planned_with_copy, situation_of
from hocket.cli.printing import say
from hocket.cli.table import show_table
from hocket.config.component import component_name
from hocket.launch.hosts import Host
from hocket.quantities import format_bytes, format_seconds
from hocket.strategy.scope import Placement
from hocket.strategy.strategy import Phase
from hocket.training.run import RunConfig

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.situation import TrainingSituation

_HEADERS = ("strategy", "gradients", "parameters", "sent per step", "time per step", "memory")
_COMPUTING = "computing"


def plan_several(
    targets: Sequence[str],
    overrides: tuple[str, ...],
    ranks: int | None,
    hosts: Sequence[Host],
    given: GivenModel | None = None,
) -> None:
    """Print a row for each phase of several recipes or files, with the same overrides.

    Args, Raises: as in `plan_command`.
    """
    planned = [planned_run(target, overrides, ranks, hosts) for target in targets]

    from hocket.cli.checking import check_run

    # If any run has `compute.step_s`, there is a column for the share of time that ranks compute.
    with_share = any(run.compute.step_s for run, _ in planned)
    headers = (*_HEADERS, *((_COMPUTING,) * with_share))
    rows = []
    titles = set()
    copies = False
    for target, (run, placement) in zip(targets, planned, strict=True):
        task = check_run(run)
        situation = situation_of(run, task, placement, given)
        for phase in run.strategy.in_phases:
            costs = planned_with_copy(run, situation, phase.strategy)
            copies = copies or bool(costs.copied_bytes)
            share = _computing(situation, costs)
            rows.append((*_row(target, run, phase, costs), share)[: len(headers)])
        titles.add(f"{ranks_of(run, placement)}; {size_of(run, costs, given)}")
    print("\n".join(sorted(titles)))
    print()
    show_table(headers, rows, numbers=headers[3:])
    print()
    say(_notes(placement, copies=copies))


def _notes(placement: Placement, *, copies: bool) -> list[str]:
    """Return the lines below the table; `copies` says whether a row counts a copy for checkpoints."""
    of_memory = "buffers and the copy for checkpoints" if copies else "buffers"
    sent = (
        "Sent: bytes of a rank on average. Time: from network.latency_s and network.bandwidth_bits_per_s; overlap does "
        f"not shorten it. Memory: {of_memory}, in multiples of the parameters' size. `hocket plan RECIPE` shows the "
        "exchanges of one strategy."
    )
    return [sent, *([HOSTS] if len(set(placement.hosts)) > 1 else [])]


def _row(target: str, run: RunConfig, phase: Phase, costs: Plan) -> tuple[str, ...]:
    name = target if "=" in target else run.strategy.name or target
    slots = (phase.strategy.gradients, phase.strategy.parameters)
    return (
        f"{name}, from step {phase.step}" if run.strategy.phases else name,
        *(", ".join(component_name(each.collective) for each in slot) or "-" for slot in slots),
        format_bytes(costs.bytes_per_step),
        format_seconds(costs.seconds_per_step),
        f"{costs.in_models(costs.memory_bytes):.2f} x",
    )


def _computing(situation: TrainingSituation, costs: Plan) -> str:
    from hocket.plan.utilisation import computing_share

    step_s = situation.settings.compute.step_s
    if not step_s:
        return ""
    return f"{computing_share(costs, step_s, held_up_s=situation.held_up_seconds(costs)):.0%}"
