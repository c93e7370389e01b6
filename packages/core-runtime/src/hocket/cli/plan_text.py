"""Sentences of `hocket plan`: ranks, models, components by name, and the assumptions below the table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hocket.cli.network_options import GivenModel
from hocket.collective.api import Ends
from hocket.config.component import component_name, telling_fields
from hocket.config.settings import IslandSettings, RunSettings
from hocket.plain import TreeView
from hocket.plan.links import WITHIN_A_HOST
from hocket.quantities import format_bytes, format_seconds
from hocket.strategy.exchange import Buffers
from hocket.strategy.scope import Placement

if TYPE_CHECKING:
    from hocket.delays import Delays
    from hocket.plan.plan import ExchangePlan, Plan

#: The effect of hosts on a plan.
HOSTS = (
    "Hosts: a host's ranks share memory, and may form a group with a leader (over: {name: group, by: host}). The "
    "bandwidth is that of each host's link, which its ranks share; messages within a host pass through memory, at "
    f"{WITHIN_A_HOST.bandwidth_bits_per_s / 1e9:.0f} Gbit/s and {format_seconds(WITHIN_A_HOST.latency_s)}."
)

#: The overlap that predictions assume.
ASSUMED_OVERLAP = (
    "Assumed overlap: backward, two thirds of a step, hides all gradients except the last segment; forward, one third, "
    "hides exchanges with overlap forward; a delay hides whole steps."
)

#: The number of steps over which injected delays are averaged.
_STEPS_LOOKED_AT = 1000


def ranks_of(run: RunSettings, placement: Placement) -> str:
    """Return the numbers of ranks, hosts and islands as text."""
    assert run.ranks is not None
    hosts = len(set(placement.hosts))
    return run.island.count(run.ranks) + (f" on {hosts} hosts" if hosts > 1 else "")


def islands_of(island: IslandSettings) -> str:
    """Return the sentence on what islands send."""
    return (
        f"Islands: {island.ranks} ranks hold a replica together. Each exchanges its shard with the ranks at the same "
        "place in other islands, all at once over the same links. Traffic of FSDP or tensor parallelism within "
        "islands is not counted."
    )


def size_of(run: RunSettings, plan: Plan, given: GivenModel | None) -> str:
    """Return the model's name and size as text."""
    model = f"task {run.task.name}" if given is None else given[0]
    size = format_bytes(plan.model_bytes)
    return f"{model}: {plan.num_parameters:,} trainable parameters, {size}{' on each rank' * plan.sharded}"


def assumptions(run: RunSettings, placement: Placement, plan: Plan) -> Iterator[str]:
    """Yield the sentences below a plan's table."""
    bandwidth = run.network.bandwidth_bits_per_s
    several = len(set(placement.hosts)) > 1
    joined = "host" if several else "island" if run.island.ranks > 1 else "rank"
    speed = "unlimited bandwidth" if math.isinf(bandwidth) else f"{bandwidth / 1e9:.3g} Gbit/s per {joined}"
    yield (
        "Sent: bytes that a rank sends, averaged over ranks and steps. Allreduce uses a ring, broadcast a tree, and "
        "gossip sends to each neighbour. Padding and flags are included, as in summary.json."
    )
    yield (
        f"Time: for a latency of {format_seconds(run.network.latency_s)} and {speed} (network.latency_s, "
        "network.bandwidth_bits_per_s), one segment after the other, without other traffic. Overlap does not "
        "shorten it."
    )
    yield (
        "Memory: send and receive buffers, in multiples of the trainable parameters' size. Parameters "
        + ("stay where they are. " if plan.sharded else "move into flat memory of the same size. ")
        + "If gradients are exchanged, .grad is a view of the receive buffer and needs no extra memory. Optimizer "
        "and activations are not counted."
    )
    yield from copy_of(run, plan)
    if run.island.ranks > 1:
        yield islands_of(run.island)
    if several:
        yield HOSTS
    if plan.strategy.samples is not None:
        yield (
            f"Ranks also send each other samples ({title(plan.strategy.samples)}). Their size is not known here, so "
            "it is not counted."
        )
    if run.delays is not None:
        yield _delays(run.delays, run, plan.ranks * run.island.ranks)
    if plan.ranks == 1:
        yield "A single rank exchanges nothing."
    for planned in plan.exchanges:
        yield from _of_exchange(planned, plan, run)
    if any(planned.exchange.every != 1 for planned in plan.exchanges):
        yield "The costs of exchanges that are not due in every step are averaged over the steps."


def copy_of(run: RunSettings, plan: Plan) -> Iterator[str]:
    """Yield the sentence on the copy that checkpoints beside training are written from, if there is one."""
    if plan.copied_bytes:
        yield (
            f"Checkpoint copy: checkpoint.blocking=false keeps {format_bytes(plan.copied_bytes)} of host "
            "memory on each rank, for a copy of the saved state: model, optimizer, and the state of "
            "exchanges."
        )


def _of_exchange(planned: ExchangePlan, plan: Plan, run: RunSettings) -> Iterator[str]:
    exchange = planned.exchange
    for size in sorted({len(scope) for scope in planned.scopes} - {1}):
        yield from exchange.collective.notes(exchange.compressor, planned.layouts, size, run.network)
    topology = exchange.topology
    is_open = exchange.collective.traits.ends is Ends.OPEN
    if topology is not None and not topology.columns_sum_to_one and not is_open:
        yield (
            f"{exchange.name}: averaging over {title(topology)} changes the replicas' mean, because some ranks send "
            "to more ranks than they receive from."
        )
    if exchange.outer is not None:
        mean = "the mean of " if exchange.collective.traits.ends is Ends.OWN else ""
        yield (
            f"{exchange.name}: consensus and evaluation use {mean}the outer parameters, which contain the training "
            "up to the last exchange."
        )
        if plan.num_buffers and exchange.buffers is Buffers.OWN:
            yield (
                f"{exchange.name}: the model's {plan.num_buffers} buffers (BatchNorm's statistics) differ between "
                "ranks until a consensus; `buffers: mean` averages them at the end of each period."
            )
    if exchange.stagger and planned.layouts:
        largest = max(layout.wire_bytes for layout in planned.layouts)
        yield (
            f"{exchange.name}: segments take turns, so one step exchanges at most {format_bytes(largest)} of "
            f"{format_bytes(sum(layout.wire_bytes for layout in planned.layouts))}."
        )


def _delays(delays: Delays, run: RunSettings, size: int) -> str:
    seconds = np.stack([delays.of_step(step, size, run.seed) for step in range(_STEPS_LOOKED_AT)])
    mean, longest = format_seconds(seconds.mean()), format_seconds(seconds.max(axis=1).mean())
    return (
        f"Injected delays, {title(delays)}: they delay a rank by {mean} per step on average, and by {longest} if all "
        "ranks wait for each other in every step."
    )


def title(component: object) -> str:
    """Return a component's name as in a config, with its numbers and its settings other than defaults."""
    return _named({"name": component_name(component), **telling_fields(component)})


def _named(plain: TreeView) -> str:
    fields = ", ".join(
        f"{key}: {_named(value) if isinstance(value, Mapping) else value}"
        for key, value in plain.items()
        if key != "name"
    )
    # A mapping without a name is not a component but a field of one.
    return " ".join(part for part in (str(plain.get("name", "")), f"{{{fields}}}" if fields else "") if part)
