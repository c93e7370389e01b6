"""`hocket recommend`: strategies ranked by what a step is predicted to take; no rank is started."""

from __future__ import annotations

import contextlib
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.cli.recommend_options import Asked
from hocket.cli.situation import (
    MATRICES,
    base_of,
    based_on_asked,
    delays_among,
    model_asked,
    placement_of,
    step_seconds,
)
from hocket.cli.table import format_bytes, format_seconds, show_table
from hocket.errors import HocketError
from hocket.plugin import Registry, default_registry
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, load_run

if TYPE_CHECKING:
    from torch import nn

    from hocket.delays import Delays
    from hocket.plan.advice import Prediction
    from hocket.plan.plan import Plan
    from hocket.strategy.strategy import Strategy

__all__ = ["recommend_command"]

_HEADERS = ("strategy", "step", "computing", "waiting", "held up", "sent per step", "memory")
_PACKING = "compressing"
_TEXT_WIDTH = 110
#: The numbers of hosts that are looked at for what plain allreduce is good for.
_HOSTS = tuple(2**power for power in range(1, 11))


@dataclass(frozen=True)
class _Candidate:
    """A recipe that could be taken.

    Attributes:
        run: with all that was asked for.
        strategy: its last phase's.
        packing_s: seconds of a step that its compressors compute; 0 where that is not measured.
    """

    run: RunConfig
    strategy: Strategy
    packing_s: float = 0.0

    @property
    def name(self) -> str:
        assert self.run.strategy.name is not None
        return self.run.strategy.name


def recommend_command(asked: Asked) -> None:
    """Carry out `hocket recommend`.

    Raises:
        UserError: whatever is wrong with what was asked for.
    """
    registry = default_registry()
    base = base_of(asked, registry)
    placement = placement_of(asked, base)
    model = model_asked(asked, base)
    step_s = step_seconds(asked, base)
    delays = delays_among(base, placement)
    candidates, refused = _candidates(asked, base, registry, placement, model)

    from hocket.plan.advice import least_bandwidth_for_plain, most_hosts_for_plain, predict
    from hocket.plan.lateness import held_up_seconds
    from hocket.plan.plan import plan

    if asked.measure:
        from hocket.plan.packing_time import packing_seconds

        candidates = [
            replace(each, packing_s=packing_seconds(plan(each.strategy, model, placement, each.run.network)))
            for each in candidates
        ]

    known: dict[tuple[str, Placement], float] = {}

    def held_up(name: str, where: Placement, costs: Plan) -> float:
        """Return it from where it was found with another bandwidth, of which it knows nothing."""
        if delays is None:
            return 0.0
        if (name, where) not in known:
            known[name, where] = held_up_seconds(costs, step_s, delays)
        return known[name, where]

    def predicted(where: Placement, bandwidth: float) -> list[Prediction]:
        found = []
        network = replace(base.network, bandwidth_bytes_per_s=bandwidth)
        for each in candidates:
            with contextlib.suppress(HocketError):  # not for so many ranks
                costs = plan(each.strategy, model, where, network)
                found.append(
                    predict(each.name, costs, step_s, held_up(each.name, where, costs), each.packing_s)
                )
        return sorted(found, key=lambda prediction: prediction.step_s)

    bandwidth = base.network.bandwidth_bytes_per_s
    _show_head(base, placement, plan(base.strategy, model, placement, base.network), step_s, delays)
    found = predicted(placement, bandwidth)
    _show(found, step_s, packing=asked.measure)
    per_host = placement.size // len(set(placement.hosts))
    grown = [hosts for hosts in _HOSTS if delays is None or _fits(delays, hosts * per_host)]
    _say(
        [
            _said_of_bandwidth(least_bandwidth_for_plain(lambda each: predicted(placement, each))),
            _said_of_hosts(
                most_hosts_for_plain(
                    lambda hosts: predicted(Placement.of_counts([per_host] * hosts), bandwidth), grown
                ),
                grown[-1] if grown else 0,
            ),
        ]
    )
    told = {each.name: each.run for each in candidates}
    print("\nWhat they change, and what that cost where it was measured:")
    _say([f"{p.name}: {told[p.name].changes or 'see its paper'}. {_measured(told[p.name])}" for p in found])
    if refused:
        print("\nNot possible here:")
        _say([f"{name}: {why}" for name, why in refused])
    print()
    _say(_assumptions(asked, delays))


def _fits(delays: Delays, ranks: int) -> bool:
    try:
        delays.check_size(ranks)
    except ValueError:
        return False
    return True


def _candidates(
    asked: Asked, base: RunConfig, registry: Registry, placement: Placement, model: nn.Module
) -> tuple[list[_Candidate], list[tuple[str, str]]]:
    """Return the recipes that could be taken, and those that cannot, with the reason."""
    from hocket.cli.checking import check_run
    from hocket.plan.plan import plan

    found, refused = [], []
    registry.load_installed()
    for recipe in registry.recipes():
        name = recipe.name
        try:
            run = load_run(based_on_asked(asked, name, registry), asked.overrides, registry=registry)
            if run.engine != base.engine:
                continue
            if not (run.accuracy or asked.all) or not run.strategy.exchanges:
                continue
            if asked.optimizer is not None:
                run = replace(run, optimizer=base.optimizer)
            run = replace(run, network=base.network)
            last = max((phase.step for phase in run.strategy.phases), default=0)
            candidate = _Candidate(run, run.strategy.at(last))
            check_run(run)
            plan(candidate.strategy, model, placement, base.network)
        except HocketError as error:
            refused.append((name, str(error)))
        else:
            found.append(candidate)
    return found, refused


def _show_head(
    base: RunConfig, placement: Placement, planned: Plan, step_s: float, delays: Delays | None
) -> None:
    hosts = len(set(placement.hosts))
    speed = base.network.bandwidth_bytes_per_s
    late = "" if delays is None else f", {type(delays).__name__} delays"
    _say(
        [
            f"{placement.size} ranks on {hosts} host{'s' * (hosts > 1)}, {8 * speed / 1e9:.3g} Gbit/s a rank, latency "
            f"{format_seconds(base.network.latency_s)}; {planned.num_parameters:,} parameters, "
            f"{format_bytes(planned.model_bytes)}; a step computes {format_seconds(step_s)}{late}"
        ],
        bullet="",
    )
    print()


def _show(found: Sequence[Prediction], step_s: float, *, packing: bool) -> None:
    headers = (*_HEADERS, *((_PACKING,) * packing))
    rows = [
        (
            each.name,
            format_seconds(each.step_s),
            f"{step_s / each.step_s:.0%}",
            format_seconds(each.exposed_s),
            format_seconds(each.held_up_s),
            format_bytes(each.bytes_per_step),
            format_bytes(each.memory_bytes),
            *((format_seconds(each.packing_s),) * packing),
        )
        for each in found
    ]
    show_table(headers, rows, numbers=headers[1:])
    print()


def _said_of_bandwidth(least: float | None) -> str:
    from hocket.plan.advice import CLOSE, PLAIN

    margin = f"{100 * (CLOSE - 1):.0f} %"
    if least is None:
        return f"Plain allreduce ({PLAIN}) is behind the best by more than {margin} at any bandwidth."
    return f"Plain allreduce ({PLAIN}) is within {margin} of the best from {8 * least / 1e9:.3g} Gbit/s a rank on."


def _said_of_hosts(most: int | None, last: int) -> str:
    from hocket.plan.advice import CLOSE

    margin = f"{100 * (CLOSE - 1):.0f} %"
    if most is None:
        return "With this network it is behind with any number of such hosts."
    if most == last:
        return f"With this network it is within {margin} of the best up to {last} such hosts, the most looked at."
    return f"With this network it is within {margin} of the best up to {most} such hosts."


def _measured(run: RunConfig) -> str:
    return f"Measured: {run.accuracy}." if run.accuracy else "Not measured."


def _assumptions(asked: Asked, delays: Delays | None) -> list[str]:
    lines = [
        "Predicted, not measured: exchanges take what `hocket plan` says, one at a time; overlap backward hides two "
        "thirds of a step, overlap forward a third, and a delay so many steps. A fast step is worth nothing by "
        "itself: compare what strategies reach in the same time (`hocket sweep`, `hocket compare`).",
    ]
    if asked.params is not None:
        lines.append(f"The model is taken for {MATRICES} equal matrices: --model or task= says more.")
    if not asked.measure:
        lines.append(
            "Computing that compressors do is not counted: --measure takes its time on this machine."
        )
    if delays is not None:
        lines.append(
            "Held up: by ranks that are late, one's own delays included; ranks with partial collectives do not wait."
        )
    if not asked.all:
        lines.append("--all ranks recipes, too, whose accuracy has not been measured.")
    return lines


def _say(lines: Sequence[str], bullet: str = "- ") -> None:
    width = shutil.get_terminal_size((_TEXT_WIDTH, 0)).columns
    for line in lines:
        print(textwrap.fill(line, width, initial_indent=bullet, subsequent_indent=" " * len(bullet)))
