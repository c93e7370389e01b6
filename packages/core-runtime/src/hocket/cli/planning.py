"""`hocket plan`: a strategy's exchanges and their costs; no rank is started, no sample read."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.cli.combinations import target_and_overrides
from hocket.cli.printing import TEXT_WIDTH
from hocket.cli.table import format_bytes, format_seconds, show_table
from hocket.collective.api import Ends
from hocket.config.component import component_name, telling_fields
from hocket.config.settings import TransportName
from hocket.errors import UserError
from hocket.outer.merge import AddDisplacement
from hocket.plan.links import WITHIN_A_HOST
from hocket.quantities import count, read
from hocket.strategy.exchange import Buffers
from hocket.strategy.scope import Placement
from hocket.training.run import RunConfig, build_engine, load_run
from hocket.transport.hosts import Host, share_out

if TYPE_CHECKING:
    from torch import nn

    from hocket.delays import Delays
    from hocket.plan.plan import ExchangePlan, Plan
    from hocket.strategy.strategy import Strategy
    from hocket.task.api import Task

__all__ = [
    "ASSUMED_OVERLAP",
    "DEFAULT_RANKS",
    "HOSTS",
    "MATRICES",
    "held_up",
    "model_of",
    "model_of_size",
    "plan_command",
    "planned_for",
    "planned_run",
    "ranks_of",
    "size_of",
    "title",
]

#: The number of equal matrices assumed for a model of which only the number of parameters is known.
MATRICES = 24

#: The number of ranks to plan for by default.
DEFAULT_RANKS = 4

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

#: The effect of hosts on a plan.
HOSTS = (
    "Hosts: a host's ranks share memory, and may form a group with a leader (over: {name: group, by: host}). The "
    "bandwidth is that of each host's link, which its ranks share; messages within a host pass through memory, at "
    f"{WITHIN_A_HOST.bandwidth_bits_per_s / 1e9:.0f} Gbit/s and {format_seconds(WITHIN_A_HOST.latency_s)}."
)

#: The overlap that predictions assume.
ASSUMED_OVERLAP = (
    "Assumed overlap: backward, two thirds of a step, hides gradients but for the last segment; forward, one third, "
    "hides exchanges with overlap forward; a delay hides whole steps."
)

#: The number of steps over which injected delays are averaged.
_STEPS_LOOKED_AT = 1000
_NUMBERS = _HEADERS[4:6] + _HEADERS[7:]


def plan_command(
    target: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    hosts: Sequence[Host] = (),
    params: str | None = None,
) -> tuple[RunConfig, Placement]:
    """Carry out `hocket plan`, and return the planned run with its number of ranks, and its replicas' placement.

    Args:
        target, overrides: as `load_run` takes them.
        ranks: the number of ranks; None for the hosts' places, or the file's number.
        hosts: the ranks' hosts; none for one host.
        params: the number of the model's parameters, such as 25M; None for the task's model.

    Raises:
        UserError: a wrong argument, the number of ranks included.
    """
    run, placement = planned_run(target, overrides, ranks, hosts)

    from hocket.cli.checking import check_run
    from hocket.cli.planning_stages import show_stages, stages_of

    task = check_run(run)

    model = model_of(task) if params is None else model_of_size(params)
    engine = build_engine(run)
    stages = stages_of(run, engine, task)
    if stages and params is not None:
        raise UserError(
            f"--params: engine {run.engine.name} cuts the task's own model into stages: leave it out"
        )
    for step, strategy in [
        (0, run.strategy.at(0)),
        *((p.step, p.strategy) for p in run.strategy.phases if p.step),
    ]:
        if run.strategy.phases:
            print(f"From step {step} on:")
        _show(run, placement, partial(planned_for, run, strategy, model, placement), bool(stages), params)
    if stages:
        show_stages(stages, placement.size)
    return run, placement


def planned_run(
    target: str, overrides: tuple[str, ...], ranks: int | None, hosts: Sequence[Host]
) -> tuple[RunConfig, Placement]:
    """Return the run to plan, with its number of ranks, and its replicas' placement; without torch.

    Args, Raises: as in `plan_command`; a recipe or a file may be followed by overrides of its own.
    """
    if not os.path.isfile(target) and "=" in target:
        target, together = target_and_overrides(target, overrides, repr(target))
        overrides = tuple(together)
    run = load_run(target, overrides)
    shared = share_out(hosts, ranks) if hosts else ()
    run = replace(run, ranks=sum(host.ranks for host in shared) or ranks or run.ranks or DEFAULT_RANKS)
    assert run.ranks is not None
    run.check_size(run.ranks)
    replicas = build_engine(run).data_size(run.ranks)
    if not shared:
        return run, Placement.on_one_host(replicas)
    if replicas != run.ranks:
        raise UserError(
            f"--hosts: engine {run.engine.name} divides the model over ranks, and hosts are not planned for such "
            "engines: leave it out"
        )
    return run, Placement.of_counts([host.ranks for host in shared])


def planned_for(
    run: RunConfig, strategy: Strategy, model: nn.Module, placement: Placement, bandwidth: float
) -> Plan:
    """Return the plan for links of `bandwidth` bits per second."""
    from hocket.plan.plan import plan
    from hocket.transport.host import SMALLEST_BYTES

    shared_bytes = math.inf if run.transport is TransportName.VIRTUAL else SMALLEST_BYTES
    network = replace(run.network, bandwidth_bits_per_s=bandwidth)
    return plan(strategy, model, placement, network, shared_bytes=shared_bytes)


def model_of(task: Task) -> nn.Module:
    """Build the task's model without memory, or with it, if the model reads values while it is built."""
    import torch

    with contextlib.suppress(Exception), torch.device("meta"):
        return task.model()
    # If the model itself is at fault, this fails in the user's own words.
    return task.model()


def model_of_size(params: str) -> nn.Module:
    """Build a model without memory of about as many parameters as a text such as 25M says.

    Raises:
        UserError: the text is no such number.
    """
    import torch
    from torch import nn

    width = max(1, round((read("--params", count, params) / MATRICES) ** 0.5))
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(MATRICES)))


def size_of(run: RunConfig, plan: Plan, params: str | None) -> str:
    """Return the model's name and size as text."""
    model = f"task {run.task.name}" if params is None else f"{MATRICES} equal matrices"
    return f"{model}: {plan.num_parameters:,} trainable parameters, {format_bytes(plan.model_bytes)}"


def held_up(run: RunConfig, plan: Plan) -> float:
    """Return the mean seconds of a step in which a rank is held up by the run's delays."""
    from hocket.plan.lateness import held_up_seconds

    return 0.0 if run.delays is None else held_up_seconds(plan, run.compute.step_s, run.delays, run.seed)


def _show(
    run: RunConfig,
    placement: Placement,
    planned: Callable[[float], Plan],
    shared_out: bool,
    params: str | None,
) -> None:
    assert run.ranks is not None
    plan = planned(run.network.bandwidth_bits_per_s)
    name = run.strategy.name or "own strategy"
    width = shutil.get_terminal_size((TEXT_WIDTH, 0)).columns
    print(textwrap.fill(f"{name}: {run.description}" if run.description else name, width))
    print(f"{ranks_of(run, placement)}; {size_of(run, plan, params)}")
    print()
    if shared_out and (not plan.exchanges or plan.ranks == 1):
        return
    if not plan.exchanges:
        print("There are no exchanges: every rank trains alone.")
        return
    rows = [_row(plan, planned) for planned in plan.exchanges]
    if len(rows) > 1:
        sent, seconds = format_bytes(plan.bytes_per_step), format_seconds(plan.seconds_per_step)
        rows.append(("together", *("",) * 6, sent, seconds, _models(plan, plan.memory_bytes)))
    show_table(_HEADERS, rows, numbers=_NUMBERS)
    print()
    for line in [*_assumptions(run, placement, plan), *_utilisation(run, planned)]:
        print(textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  "))


def _utilisation(run: RunConfig, planned: Callable[[float], Plan]) -> list[str]:
    """Return a line on the share of their time that ranks compute; none if the run has no `compute.step_s`."""
    from hocket.plan.utilisation import BANDWIDTHS, computing_share, least_bandwidths

    step_s = run.compute.step_s
    if not step_s:
        return []
    plan = planned(run.network.bandwidth_bits_per_s)
    held_up_s = held_up(run, plan)
    share = computing_share(plan, step_s, held_up_s=held_up_s)
    bandwidths = least_bandwidths(planned, step_s, _SHARES, held_up_s=held_up_s)
    parts = []
    for bandwidth, shares in groupby(zip(bandwidths, _SHARES, strict=True), key=lambda pair: pair[0]):
        least, *_, most = 2 * [share for _, share in shares]
        further = "or less" if bandwidth == BANDWIDTHS[0] else "on"
        parts.append(
            f"{most:.0%} from {bandwidth / 1e9:.3g} Gbit/s {further}" if bandwidth else f"{least:.0%} never"
        )
    late = f", {format_seconds(held_up_s)} of them held up by late ranks" if held_up_s else ""
    return [
        f"Computing, for steps of {format_seconds(step_s)} (compute.step_s): {share:.1%} of a rank's time, a step of "
        f"{format_seconds(step_s / share)}{late}; {', '.join(parts)}, per rank. {ASSUMED_OVERLAP}"
    ]


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


def ranks_of(run: RunConfig, placement: Placement) -> str:
    """Return the numbers of ranks and hosts as text."""
    hosts = len(set(placement.hosts))
    return f"{run.ranks} rank{'s' * (run.ranks != 1)}" + (f" on {hosts} hosts" if hosts > 1 else "")


def _assumptions(run: RunConfig, placement: Placement, plan: Plan) -> list[str]:
    bandwidth = run.network.bandwidth_bits_per_s
    joined = "host" if len(set(placement.hosts)) > 1 else "rank"
    speed = "unlimited bandwidth" if math.isinf(bandwidth) else f"{bandwidth / 1e9:.3g} Gbit/s per {joined}"
    lines = [
        "Sent: bytes that a rank sends, on average over ranks and steps: by a ring (allreduce), a tree (broadcast) "
        "or to each neighbour (gossip), with the padding and the flags that travel with gradients. summary.json "
        "counts in the same way.",
        f"Time: for a latency of {format_seconds(run.network.latency_s)} and {speed} (network.latency_s, "
        "network.bandwidth_bits_per_s), without other traffic, one segment after the other. Time that an overlap "
        "hides is not subtracted.",
        "Memory: send and receive buffers, in multiples of the trainable parameters' size. Parameters move into flat "
        "memory of the same size. Where gradients are exchanged, .grad is a view of the receive buffer and needs no "
        "memory of its own. Optimizer and activations are not counted.",
    ]
    if len(set(placement.hosts)) > 1:
        lines.append(HOSTS)
    if plan.strategy.samples is not None:
        lines.append(
            f"Samples travel, too, by {title(plan.strategy.samples)}. Their size is not known here, so they are not "
            "counted."
        )
    if run.delays is not None:
        lines.append(_delays(run.delays, run, plan.ranks))
    if plan.ranks == 1:
        lines.append("A single rank exchanges nothing.")
    for planned in plan.exchanges:
        exchange = planned.exchange
        for size in sorted({len(scope) for scope in planned.scopes} - {1}):
            lines += exchange.collective.notes(exchange.compressor, planned.layouts, size, run.network)
        topology = exchange.topology
        passive = exchange.collective.traits.passive
        if topology is not None and not topology.columns_sum_to_one and not passive:
            lines.append(
                f"{exchange.name}: averaging over {title(topology)} does not preserve the replicas' mean, as some "
                "ranks send to more ranks than they receive from."
            )
        if exchange.outer is not None:
            mean = "the mean of " if exchange.collective.traits.ends is Ends.OWN else ""
            lines.append(
                f"{exchange.name}: consensus and evaluation use {mean}the outer parameters, which contain the ranks' "
                "training up to the last time it was sent."
            )
            if plan.num_buffers and exchange.buffers is Buffers.OWN:
                lines.append(
                    f"{exchange.name}: the model's {plan.num_buffers} buffers (BatchNorm's statistics) stay each "
                    "rank's own until a consensus; `buffers: mean` averages them at the end of each period."
                )
        if exchange.stagger and planned.layouts:
            largest = max(layout.wire_bytes for layout in planned.layouts)
            lines.append(
                f"{exchange.name}: segments take turns, so that one step exchanges at most {format_bytes(largest)} "
                f"of {format_bytes(sum(layout.wire_bytes for layout in planned.layouts))}."
            )
    if any(planned.exchange.every != 1 for planned in plan.exchanges):
        lines.append("The costs of exchanges that are not due in every step are averaged over the steps.")
    return lines


def _delays(delays: Delays, run: RunConfig, size: int) -> str:
    seconds = np.stack([delays.of_step(step, size, run.seed) for step in range(_STEPS_LOOKED_AT)])
    mean, longest = format_seconds(seconds.mean()), format_seconds(seconds.max(axis=1).mean())
    return (
        f"Injected delays, {title(delays)}: a rank is held up for {mean} per step on average; if all ranks wait for "
        f"each other in every step, for {longest}."
    )


def title(component: object) -> str:
    """Return a component's name as in a config, with its numbers and its settings other than defaults."""
    return _named({"name": component_name(component), **telling_fields(component)})


def _named(plain: Mapping[str, Any]) -> str:
    fields = ", ".join(
        f"{key}: {_named(value) if isinstance(value, Mapping) else value}"
        for key, value in plain.items()
        if key != "name"
    )
    # A mapping without a name is not a component but a field of one.
    return " ".join(part for part in (str(plain.get("name", "")), f"{{{fields}}}" if fields else "") if part)


def _models(plan: Plan, nbytes: float) -> str:
    return f"{plan.in_models(nbytes):.2f} x"
