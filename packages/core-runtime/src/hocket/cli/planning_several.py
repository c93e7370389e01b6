"""`hocket plan` of several recipes: a row for each."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.cli.planning import (
    HOSTS,
    held_up,
    model_of,
    model_of_size,
    planned_for,
    planned_run,
    ranks_of,
    size_of,
)
from hocket.cli.printing import TEXT_WIDTH
from hocket.cli.table import format_bytes, format_seconds, show_table
from hocket.config.component import component_name
from hocket.training.run import RunConfig
from hocket.transport.hosts import Host

if TYPE_CHECKING:
    from hocket.plan.plan import Plan

__all__ = ["plan_several"]

_HEADERS = ("strategy", "gradients", "parameters", "sent per step", "time per step", "memory")
_COMPUTING = "computing"


def plan_several(
    targets: Sequence[str],
    overrides: tuple[str, ...],
    ranks: int | None,
    hosts: Sequence[Host],
    params: str | None = None,
) -> None:
    """Print a row for each phase of several recipes or files, with the same overrides.

    Args, Raises: as in `plan_command`.
    """
    planned = [planned_run(target, overrides, ranks, hosts) for target in targets]

    from hocket.cli.checking import check_run

    # If any run has `compute.step_s`, there is a column for the share of time that ranks compute.
    with_share = any(run.compute.step_s for run, _ in planned)
    rows = []
    titles = set()
    for target, (run, placement) in zip(targets, planned, strict=True):
        task = check_run(run)
        model = model_of(task) if params is None else model_of_size(params)
        bandwidth = run.network.bandwidth_bits_per_s
        begun = [(0, run.strategy.at(0)), *((p.step, p.strategy) for p in run.strategy.phases if p.step)]
        for step, strategy in begun:
            costs = planned_for(run, strategy, model, placement, bandwidth)
            name = target if "=" in target else run.strategy.name or target
            slots = (strategy.gradients, strategy.parameters)
            rows.append(
                (
                    f"{name}, from step {step}" if run.strategy.phases else name,
                    *(", ".join(component_name(each.collective) for each in slot) or "-" for slot in slots),
                    format_bytes(costs.bytes_per_step),
                    format_seconds(costs.seconds_per_step),
                    f"{costs.in_models(costs.memory_bytes):.2f} x",
                    *([_computing(run, costs)] * with_share),
                )
            )
        titles.add(f"{ranks_of(run, placement)}; {size_of(run, costs, params)}")
    print("\n".join(sorted(titles)))
    print()
    headers = (*_HEADERS, *((_COMPUTING,) * with_share))
    show_table(headers, rows, numbers=headers[3:])
    print()
    lines = [
        "Sent: by a rank on average. Time: from network.latency_s and network.bandwidth_bits_per_s; time that an "
        "overlap hides is not subtracted. Memory: buffers, in multiples of the parameters' size. `hocket plan RECIPE` "
        "shows the exchanges of one strategy.",
        *([HOSTS] if len(set(placement.hosts)) > 1 else []),
    ]
    width = shutil.get_terminal_size((TEXT_WIDTH, 0)).columns
    for line in lines:
        print(textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  "))


def _computing(run: RunConfig, costs: Plan) -> str:
    from hocket.plan.utilisation import computing_share

    step_s = run.compute.step_s
    return f"{computing_share(costs, step_s, held_up_s=held_up(run, costs)):.0%}" if step_s else ""
