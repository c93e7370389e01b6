"""Whose gradients a strategy trains on, found by following them through its exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from hocket.config.component import component_name
from hocket.errors import some
from hocket.strategy.exchange import Exchange
from hocket.strategy.following import after, contributors, own_contributions, roles
from hocket.strategy.placement import Placement

__all__ = ["check_contributions"]


def check_contributions(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement
) -> None:
    """Refuse exchanges after which no replica holds anything of what some rank has contributed to the step.

    A rank contributes its gradient, and by it its parameters. Gossip is taken to reach all of its scope in time.

    Raises:
        ValueError: begins with the exchange at fault; names the ranks, and says what to do.
    """
    for segment in roles((*gradients, *parameters), placement):
        for exchanged in _occasions(parameters, placement.size):
            _check_step((*gradients, *exchanged), placement, segment)


def _occasions(parameters: Sequence[Exchange], size: int) -> Iterator[list[Exchange]]:
    """Yield the exchanges of parameters that take place in a step, for steps of every kind."""
    steps = {1}
    for exchange in parameters:
        steps |= {lcm(step, exchange.period(size)) for step in steps}
    for step in sorted(steps):
        yield [exchange for exchange in parameters if step % exchange.period(size) == 0]


def _check_step(exchanges: Sequence[Exchange], placement: Placement, segment: int) -> None:
    values = own_contributions(placement)
    for exchange in exchanges:
        values = after(exchange, values, placement, segment)
        lost = sorted(set(range(placement.size)) - contributors(values))
        if lost:
            ranks = f"rank{'s' * (len(lost) > 1)} {some([str(rank) for rank in lost])}"
            collective, over = component_name(exchange.collective), component_name(exchange.over)
            raise ValueError(
                f"{exchange.name} among {placement.size} ranks: after {collective} over {over} nothing is left of the "
                f"gradients of {ranks}: let an allreduce among the same ranks come before it, or give the same size, "
                "count or by wherever the strategy says group or leaders"
            )
