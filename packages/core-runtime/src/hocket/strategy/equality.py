"""Whether a strategy keeps replicas equal, found by following tokens through its exchanges."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import lcm

from hocket.strategy.exchange import Exchange
from hocket.strategy.placement import Placement

__all__ = ["replicas_stay_equal"]


def replicas_stay_equal(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement
) -> bool:
    """Return whether replicas that begin equal are equal after every step, to the bit.

    Each rank's value is a token, and each exchange says which ranks end with the same one. Gradients begin
    different on every rank, parameters equal if the gradients have ended so.
    """
    period = lcm(*(exchange.over.num_roles(placement) for exchange in (*gradients, *parameters)))
    return all(_ends_equal(gradients, parameters, placement, segment) for segment in range(period))


def _ends_equal(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement, segment: int
) -> bool:
    own: list[Hashable] = list(range(placement.size))
    values = _after([exchange for exchange in gradients if exchange.every == 1], own, placement, segment)
    if len(set(values)) > 1:
        return False
    return len(set(_after(parameters, values, placement, segment))) == 1


def _after(
    exchanges: Sequence[Exchange], values: list[Hashable], placement: Placement, segment: int
) -> list[Hashable]:
    values = list(values)
    for exchange in exchanges:
        for part in exchange.over.parts(placement):
            members = [rank for rank in part if exchange.over.carries(rank, segment, placement)]
            if len(members) < 2:
                continue
            leader = exchange.over.leader(len(members), segment)
            results = exchange.collective.results([values[rank] for rank in members], leader)
            for rank, result in zip(members, results, strict=True):
                values[rank] = result
    return values
