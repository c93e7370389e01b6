"""Whether a strategy keeps replicas equal, found by following tokens through its exchanges."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hocket.strategy.exchange import Exchange
from hocket.strategy.following import after, own_contributions, roles
from hocket.strategy.placement import Placement

__all__ = ["replicas_stay_equal"]


def replicas_stay_equal(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement
) -> bool:
    """Return whether replicas that begin equal are equal after every step, to the bit.

    Each rank's value is a token, and each exchange says which ranks end with the same one. Gradients begin
    different on every rank, parameters equal if the gradients have ended so.
    """
    return all(
        _ends_equal(gradients, parameters, placement, segment)
        for segment in roles((*gradients, *parameters), placement)
    )


def _ends_equal(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement, segment: int
) -> bool:
    values: list[Hashable] = own_contributions(placement)
    for exchange in gradients:
        if exchange.every == 1:
            values = after(exchange, values, placement, segment)
    if len(set(values)) > 1:
        return False
    for exchange in parameters:
        values = after(exchange, values, placement, segment)
    return len(set(values)) == 1
