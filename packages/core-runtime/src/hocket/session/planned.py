"""What a session will exchange, computed from names and shapes alone: bytes, time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from torch import nn

from hocket.segment.partition import Span, named_spans
from hocket.session.layout import Layout, layouts
from hocket.strategy.exchange import Exchange
from hocket.strategy.strategy import Strategy
from hocket.transport.network import NetworkModel

__all__ = ["Plan", "PlannedExchange", "plan"]


@dataclass(frozen=True)
class PlannedExchange:
    """One exchange of a strategy among a given number of ranks.

    Attributes:
        exchange: what the strategy says.
        scopes: the ranks among which it takes place: one tuple, or one for each group.
        layouts: its segments, in the order in which they are sent.
        bytes_per_step: what a rank sends in a step, on average over ranks and steps.
        seconds_per_step: how long the slowest scope takes, segment after segment, on average over steps.
        memory_bytes: the buffers of a rank that takes part.
    """

    exchange: Exchange
    scopes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    bytes_per_step: float
    seconds_per_step: float
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """A strategy among a given number of ranks.

    Attributes:
        strategy: what is planned.
        ranks: how many.
        num_parameters: trainable numbers of the model.
        model_bytes: bytes of the trainable parameters.
        exchanges: in the order of a step.
    """

    strategy: Strategy
    ranks: int
    num_parameters: int
    model_bytes: int
    exchanges: tuple[PlannedExchange, ...]

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a rank sends in a step, on average over ranks and steps."""
        return sum(planned.bytes_per_step for planned in self.exchanges)

    @property
    def seconds_per_step(self) -> float:
        """Seconds of communication in a step, on average over steps, whether or not something hides them."""
        return sum(planned.seconds_per_step for planned in self.exchanges)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the exchanges' buffers on a rank that takes part in all of them."""
        return sum(planned.memory_bytes for planned in self.exchanges)

    def in_models(self, nbytes: float) -> float:
        """Return bytes as a multiple of the model's size."""
        return nbytes / self.model_bytes if self.model_bytes else 0.0


def plan(strategy: Strategy, model: nn.Module, ranks: int, network: NetworkModel) -> Plan:
    """Plan a strategy for a model.

    Args:
        strategy: composed.
        model: on any device, `meta` included; only names, shapes and dtypes are looked at.
        ranks: how many.
        network: what seconds are predicted for.

    Raises:
        CompositionError: a scope or a topology is not defined for so many ranks.
    """
    strategy.check_size(ranks)
    spans = named_spans((name, p) for name, p in model.named_parameters() if p.requires_grad)
    exchanges = tuple(_planned(exchange, spans, ranks, network) for exchange in strategy.exchanges)
    nbytes = sum(span.numel * span.dtype.itemsize for span in spans)
    return Plan(strategy, ranks, sum(span.numel for span in spans), nbytes, exchanges)


def _planned(exchange: Exchange, spans: list[Span], ranks: int, network: NetworkModel) -> PlannedExchange:
    collective = exchange.collective
    scope_of = [tuple(exchange.over.ranks(rank, ranks)) for rank in range(ranks)]
    # The size of the scope in which each rank takes part, 1 where it takes part in none.
    sizes = [len(scope) if rank in scope else 1 for rank, scope in enumerate(scope_of)]
    cut = layouts(exchange, spans) if max(sizes) > 1 else []
    messages = [exchange.compressor.payload_bytes(layout) for layout in cut]
    rounds_per_step = 1 / exchange.every
    topology = exchange.topology
    sent, seconds, taken = {1: 0.0}, [0.0], [0.0]
    for size in {*sizes} - {1}:
        sent[size] = sum(collective.bytes_per_round(m, size, topology) for m in messages)
        seconds.append(sum(collective.seconds_per_round(m, size, topology, network) for m in messages))
        taken.append(sum(collective.channel_bytes(m, size, topology) for m in messages))
    return PlannedExchange(
        exchange,
        tuple(dict.fromkeys(scope_of)),
        tuple(cut),
        mean(sent[size] for size in sizes) * rounds_per_step,
        max(seconds) * rounds_per_step,
        sum(layout.memory_bytes for layout in cut) + round(max(taken)),
    )
