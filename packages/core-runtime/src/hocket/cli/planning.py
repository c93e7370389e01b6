"""`hocket plan`: a strategy's exchanges and their costs; no rank is started, no sample read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from hocket.cli.network_options import GivenModel
from hocket.cli.plan_text import ASSUMED_OVERLAP, assumptions, copy_of, ranks_of, size_of, title
from hocket.cli.planned import planned_run, planned_with_copy, situation_of
from hocket.cli.printing import say
from hocket.cli.table import show_table
from hocket.errors import UserError
from hocket.launch.hosts import Host
from hocket.outer.merge import AddDisplacement
from hocket.quantities import format_bytes, format_seconds
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, build_engine

if TYPE_CHECKING:
    from hocket.plan.plan import ExchangePlan, Plan
    from hocket.plan.situation import TrainingSituation
    from hocket.strategy.strategy import Strategy

_HEADERS = (
    "exchange",
    "collective",
    "among",
    "segments",
    "size of each",
    "every",
    "overlap",
    "sent per step",
    "time per step",
    "memory",
)

#: Shares of their time that ranks are to compute, from Streaming DiLoCo's table.
_SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)

_NUMBERS = _HEADERS[4:6] + _HEADERS[7:]


def plan_command(
    target: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    hosts: Sequence[Host] = (),
    given: GivenModel | None = None,
) -> tuple[RunConfig, Placement]:
    """Carry out `hocket plan`, and return the planned run with its number of ranks, and its replicas' placement.

    Args:
        target, overrides: as `load_run` takes them.
        ranks: the number of ranks; None for the hosts' places, or the file's number.
        hosts: the ranks' hosts; none for one host.
        given: the name of another model than the task's, and that model.

    Raises:
        UserError: a wrong argument, the number of ranks included.
    """
    run, placement = planned_run(target, overrides, ranks, hosts)

    from hocket.cli.checking import check_run
    from hocket.cli.planning_stages import show_stages, stages_of

    task = check_run(run)

    situation = situation_of(run, task, placement, given)
    engine = build_engine(run)
    stages = stages_of(run, engine, task)
    if stages and given is not None:
        raise UserError(
            f"--params, --model: engine {run.engine.name} cuts the task's own model into stages: leave both out"
        )
    for phase in run.strategy.in_phases:
        if run.strategy.phases:
            print(f"From step {phase.step} on:")
        _show(run, situation, phase.strategy, bool(stages), given)
    if stages:
        show_stages(stages, placement.size)
    return run, placement


def _show(
    run: RunConfig,
    situation: TrainingSituation,
    strategy: Strategy,
    shared_out: bool,
    given: GivenModel | None,
) -> None:
    assert run.ranks is not None
    plan, placement = planned_with_copy(run, situation, strategy), situation.placement
    name = run.strategy.name or "own strategy"
    say([f"{name}: {run.description}" if run.description else name], bullet="")
    print(f"{ranks_of(run, placement)}; {size_of(run, plan, given)}")
    print()
    if shared_out and (not plan.exchanges or plan.ranks == 1):
        return
    if not plan.exchanges:
        print("There are no exchanges: every rank trains alone.")
        say(copy_of(run, plan))
        return
    rows = [_row(plan, planned) for planned in plan.exchanges]
    if plan.copied_bytes:
        every = f"{run.checkpoint.every} steps"
        rows.append(("checkpoint copy", *("",) * 4, every, *("",) * 3, _models(plan, plan.copied_bytes)))
    if len(rows) > 1:
        sent, seconds = format_bytes(plan.bytes_per_step), format_seconds(plan.seconds_per_step)
        rows.append(("together", *("",) * 6, sent, seconds, _models(plan, plan.memory_bytes)))
    show_table(_HEADERS, rows, numbers=_NUMBERS)
    print()
    say([*assumptions(run, placement, plan), *_utilisation(run, situation, plan)])


def _utilisation(run: RunConfig, situation: TrainingSituation, plan: Plan) -> Iterator[str]:
    """Yield a line on the share of their time that ranks compute; none if the run has no `compute.step_s`."""
    from hocket.plan.utilisation import BANDWIDTHS, computing_share, least_bandwidths

    step_s = run.compute.step_s
    if not step_s:
        return
    held_up_s = situation.held_up_seconds(plan)
    share = computing_share(plan, step_s, held_up_s=held_up_s)
    bandwidths = least_bandwidths(
        partial(situation.plan, plan.strategy), step_s, _SHARES, held_up_s=held_up_s
    )
    parts = []
    for bandwidth, shares in groupby(zip(bandwidths, _SHARES, strict=True), key=lambda pair: pair[0]):
        least, *_, most = 2 * [share for _, share in shares]
        further = "or less" if bandwidth == BANDWIDTHS[0] else "on"
        parts.append(
            f"{most:.0%} from {bandwidth / 1e9:.3g} Gbit/s {further}" if bandwidth else f"{least:.0%} never"
        )
    late = f", {format_seconds(held_up_s)} of this time waiting for late ranks" if held_up_s else ""
    yield (
        f"A step that computes for {format_seconds(step_s)} (compute.step_s) takes {format_seconds(step_s / share)}"
        f"{late}. Computing is {share:.1%} of it; by bandwidth per rank: {', '.join(parts)}. {ASSUMED_OVERLAP}"
    )


def _row(plan: Plan, planned: ExchangePlan) -> tuple[str, ...]:
    exchange = planned.exchange
    sizes = [layout.wire_bytes for layout in planned.layouts]
    smallest, largest = (format_bytes(min(sizes)), format_bytes(max(sizes))) if sizes else ("", "")
    size = smallest if smallest == largest else f"{smallest} to {largest}"
    return (
        exchange.name,
        _collective(planned),
        _among(planned),
        f"{len(sizes)} ({title(exchange.segments)})",
        size,
        _every(planned),
        _overlap(planned),
        format_bytes(planned.bytes_per_step),
        format_seconds(planned.seconds_per_step),
        _models(plan, planned.memory_bytes),
    )


def _collective(planned: ExchangePlan) -> str:
    exchange = planned.exchange
    text = title(exchange.collective)
    if exchange.topology is not None:
        text += f", {title(exchange.topology)}"
    if exchange.compressor is not None:
        text += f", {title(exchange.compressor)}"
    return text if exchange.outer is None else f"{text}, outer {title(exchange.outer)}"


def _every(planned: ExchangePlan) -> str:
    periods = sorted({planned.exchange.period(len(scope)) for scope in planned.scopes})
    steps = "step" if periods == [1] else f"{' or '.join(map(str, periods))} steps"
    return f"{steps}, in turns" if planned.exchange.stagger else steps


def _overlap(planned: ExchangePlan) -> str:
    exchange = planned.exchange
    merge = "" if exchange.merge == AddDisplacement() else f", {title(exchange.merge)}"
    return (f"delay {exchange.delay}" if exchange.delay else exchange.overlap.value) + merge


def _among(planned: ExchangePlan) -> str:
    sizes = sorted({len(scope) for scope in planned.scopes})
    ranks = " or ".join(map(str, sizes)) + " rank" + "s" * (sizes != [1])
    over = title(planned.exchange.over)
    num_scopes = len(planned.scopes)
    return f"{over}: {ranks}" if num_scopes == 1 else f"{over}: {num_scopes} times {ranks}"


def _models(plan: Plan, nbytes: float) -> str:
    return f"{plan.in_models(nbytes):.2f} x"
