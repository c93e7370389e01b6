"""The bytes, seconds and memory of a strategy's exchanges, computed from names and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from torch import nn

from hocket.compressor.api import footprint_of
from hocket.plan.buffers import averaged_buffers, mean_cost
from hocket.plan.layout import Layout, buffer_bytes, layouts
from hocket.plan.links import networks
from hocket.segment.partition import ParameterSpan, named_spans
from hocket.strategy.exchange import Buffers, Exchange
from hocket.strategy.scope import Placement
from hocket.strategy.strategy import Strategy
from hocket.transport.network import Cost, NetworkModel


@dataclass(frozen=True)
class ExchangePlan:
    """The costs of one exchange of a strategy among a given number of ranks.

    Attributes:
        exchange: the strategy's exchange.
        scopes: the ranks that take part: one tuple, or one for each group.
        layouts: its segments, in the order in which they are sent.
        bytes_per_step: bytes that a rank sends in a step, on average over ranks and steps.
        seconds_per_step: seconds of the slowest scope, segment after segment, on average over steps.
        segment_seconds: the same of each segment that the slowest rank takes part in, each time that it is exchanged.
        memory_bytes: bytes of the buffers of a rank that takes part.
    """

    exchange: Exchange
    scopes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    bytes_per_step: float
    seconds_per_step: float
    segment_seconds: tuple[float, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """The plan of a strategy among a given number of ranks.

    Attributes:
        strategy: the planned strategy.
        ranks: number of ranks, or of islands that hold a replica each.
        num_parameters: number of the model's trainable values.
        model_bytes: bytes of the trainable parameters on a rank.
        num_buffers: number of the model's running statistics, as BatchNorm's.
        exchanges: in the order of a step.
        sharded: whether a rank holds a shard of each parameter.
        copied_bytes: bytes of the copy of a rank's state that checkpoints beside training are written from; 0 for none.
    """

    strategy: Strategy
    ranks: int
    num_parameters: int
    model_bytes: int
    num_buffers: int
    exchanges: tuple[ExchangePlan, ...]
    sharded: bool = False
    copied_bytes: int = 0

    @property
    def bytes_per_step(self) -> float:
        """Return the bytes that a rank sends in a step, on average over ranks and steps."""
        return sum(planned.bytes_per_step for planned in self.exchanges)

    @property
    def seconds_per_step(self) -> float:
        """Return the seconds of communication in a step, on average over steps, hidden or not."""
        return sum(planned.seconds_per_step for planned in self.exchanges)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of a rank's buffers for all exchanges, and of the copy for checkpoints."""
        return sum(planned.memory_bytes for planned in self.exchanges) + self.copied_bytes

    def in_models(self, nbytes: float) -> float:
        """Return bytes as a multiple of the model's size."""
        return nbytes / self.model_bytes if self.model_bytes else 0.0


def plan(
    strategy: Strategy,
    model: nn.Module,
    ranks: int | Placement,
    network: NetworkModel,
    *,
    shared_bytes: float = math.inf,
    island: int | Mapping[str, int] = 1,
) -> Plan:
    """Plan a strategy for a model.

    Args:
        strategy: a composed strategy.
        model: on any device, `meta` included; only names, shapes and dtypes are used.
        ranks: number of ranks on one host, or their placement on hosts.
        network: the network to predict seconds for, between hosts; with one host, between its ranks.
        shared_bytes: least size, in bytes, of segments in memory shared by the ranks of a host; infinite if they share
            none.
        island: number of ranks among which each parameter of a replica is divided, or that of each by name (1 for
            others); where it is more than 1, `ranks` counts islands, the costs are those of a rank with its
            column, and `network` is its share of the island's link.

    Raises:
        CompositionError: a scope or a topology is not defined for this number of ranks, or segments outnumber a period.
    """
    placement = Placement.on_one_host(ranks) if isinstance(ranks, int) else ranks
    strategy.check_size(placement)
    spans = named_spans((name, p) for name, p in model.named_parameters() if p.requires_grad)
    numel = sum(span.numel for span in spans)
    of = island if isinstance(island, Mapping) else dict.fromkeys((s.name for s in spans), island)
    in_pieces = any(of.get(s.name, 1) > 1 for s in spans)
    if in_pieces:
        spans = [replace(s, numel=-(-s.numel // of.get(s.name, 1)), whole_numel=s.numel) for s in spans]
    planned = (
        _planned(exchange, spans, placement, network, strategy, shared_bytes, in_pieces=in_pieces)
        for exchange in strategy.exchanges
    )
    exchanges = tuple(_with_buffers(each, model, placement, network) for each in planned)
    nbytes = sum(span.numel * span.dtype.itemsize for span in spans)
    return Plan(strategy, placement.size, numel, nbytes, len(averaged_buffers(model)), exchanges, in_pieces)


def _planned(
    exchange: Exchange,
    spans: list[ParameterSpan],
    placement: Placement,
    network: NetworkModel,
    strategy: Strategy,
    shared_bytes: float,
    *,
    in_pieces: bool,
) -> ExchangePlan:
    over = exchange.over
    parts = over.parts(placement)
    if any(len({placement.hosts[rank] for rank in part}) > 1 for part in parts):
        shared_bytes = math.inf
    cut: list[Layout] = []
    if any(exchange.takes_place(len(part)) for part in parts):
        alone = len(strategy.gradients) == 1
        cut = [
            large if large.wire_bytes >= shared_bytes else small
            for large, small in zip(
                layouts(exchange, spans, alone=alone, shared=True, in_pieces=in_pieces),
                layouts(exchange, spans, alone=alone, in_pieces=in_pieces),
                strict=True,
            )
        ]
        for part in parts:
            exchange.check_segments(len(cut), len(part))
    # The exchanges of the gradients slot pass each segment on between the first one's buffers.
    taking_place = [
        each
        for each in strategy.gradients
        if any(map(each.takes_place, map(len, each.over.parts(placement))))
    ]
    own_buffers = exchange not in taking_place[1:]
    links = networks(exchange, parts, placement, network)
    costs = {
        (size, link): [
            _cost(exchange, layout, size, link, own_buffers, layout.wire_bytes >= shared_bytes)
            for layout in cut
        ]
        for size, link in set(zip(map(len, parts), links, strict=True))
    }
    # Parts of the same size that exchange the same segments over the same links have the same costs.
    carriers = [set(over.carriers(segment, placement)) for segment in range(over.num_roles(placement))]
    of_rank = [Cost()] * placement.size
    known: dict[tuple[object, ...], Cost] = {}
    slowest = 0.0
    slowest_seconds: tuple[float, ...] = ()
    for part, link in zip(parts, links, strict=True) if cut else ():
        carries = [part in those for those in carriers]
        role = (len(part), link, *carries)
        if role not in known:
            carried = [c for i, c in enumerate(costs[len(part), link]) if carries[i % len(carries)]]
            own = [layout for i, layout in enumerate(cut) if carries[i % len(carries)]] if own_buffers else []
            known[role] = sum(carried, Cost(memory=buffer_bytes(exchange, own)))
            if known[role].seconds > slowest:
                slowest = known[role].seconds
                slowest_seconds = tuple(c.seconds * exchange.period(len(part)) for c in carried)
        for rank in part:
            of_rank[rank] = known[role]
    return ExchangePlan(
        exchange,
        parts,
        tuple(cut),
        fmean(cost.bytes for cost in of_rank),
        max(cost.seconds for cost in of_rank),
        slowest_seconds,
        round(max(cost.memory for cost in of_rank)),
    )


def _with_buffers(
    planned: ExchangePlan, model: nn.Module, placement: Placement, network: NetworkModel
) -> ExchangePlan:
    """Add the costs of averaging the model's buffers, if the exchange does so."""
    exchange, sizes = planned.exchange, [len(scope) for scope in planned.scopes]
    if exchange.buffers is not Buffers.MEAN or not planned.layouts:
        return planned
    links = networks(exchange, planned.scopes, placement, network)
    costs = [(size, mean_cost(model, size, link)) for size, link in zip(sizes, links, strict=True)]
    return replace(
        planned,
        bytes_per_step=planned.bytes_per_step
        + sum(size * cost.bytes / exchange.period(size) for size, cost in costs) / sum(sizes),
        seconds_per_step=planned.seconds_per_step
        + max(cost.seconds / exchange.period(size) for size, cost in costs),
    )


def _cost(
    exchange: Exchange, layout: Layout, size: int, network: NetworkModel, own_buffers: bool, shared: bool
) -> Cost:
    collective, compressor, topology = exchange.collective, exchange.compressor, exchange.topology
    period = exchange.period(size)
    message_bytes = collective.message_bytes(compressor, layout, size, network)
    cost = collective.cost(message_bytes, size, topology, network)
    footprint = footprint_of(compressor, layout)
    received = 0.0
    if not (shared and collective.reads_shared(compressor)):
        received = collective.cost(footprint.longest_bytes, size, topology, network).memory
    return Cost(
        cost.bytes / period,
        cost.seconds / period,
        layout.kept_bytes * own_buffers + received + footprint.state_bytes,
    )
