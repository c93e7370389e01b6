"""Tokens followed through a strategy's exchanges: whether replicas stay equal, and whose gradients are lost.

Each rank's value is a token, and each exchange determines the ranks that end with the same one; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import lcm

from hocket.collective.api import Collective, Ends
from hocket.config.component import component_name
from hocket.errors import some
from hocket.strategy.exchange import Exchange
from hocket.strategy.scope import Placement


def replicas_stay_equal(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement
) -> bool:
    """Return whether replicas that begin equal are equal after every step, to the bit.

    Gradients begin different on every rank, parameters equal if the gradients have ended so.
    """
    return all(
        _ends_equal(gradients, parameters, placement, segment)
        for segment in _roles((*gradients, *parameters), placement)
    )


def _ends_equal(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement, segment: int
) -> bool:
    values: list[Hashable] = _own_contributions(placement)
    for exchange in gradients:
        if exchange.every == 1:
            values = _after(exchange, values, placement, segment)
    if not _all_equal(values):
        return False
    for exchange in parameters:
        values = _after(exchange, values, placement, segment)
    return _all_equal(values)


def _all_equal(values: Sequence[Hashable]) -> bool:
    """Return whether all tokens are equal. A set would hash all tokens within each one."""
    return all(value == values[0] for value in values)


def check_contributions(
    gradients: Sequence[Exchange], parameters: Sequence[Exchange], placement: Placement
) -> None:
    """Refuse exchanges that lose a rank's contribution to the step: no replica holds any of it.

    A rank contributes its gradient, and by it its parameters. Gossip is taken to reach all of its scope in time.

    Raises:
        ValueError: begins with the exchange at fault; names the ranks, and says what to do.
    """
    for segment in _roles((*gradients, *parameters), placement):
        for exchanged in _occasions(parameters, placement.size):
            _check_step((*gradients, *exchanged), placement, segment)


def _occasions(parameters: Sequence[Exchange], size: int) -> Iterator[list[Exchange]]:
    """Yield the exchanges of parameters that take place in a step, for steps of every kind.

    It assumes that segments with different steps have them in all exchanges alike.
    """
    met: list[tuple[int, int]] = [(1, 0)]
    for exchange in parameters:
        own = exchange.period(size), exchange.offset
        met += [both for each in met if (both := _both(each, own)) is not None]
    for period, first in dict.fromkeys(met):
        step = first % period or period
        yield [e for e in parameters if (step - e.offset) % e.period(size) == 0]


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    """Return period and first of two series' common steps; None if they have none."""
    (period, first), (other_period, other_first) = one, other
    steps = range(first, first + lcm(period, other_period), period)
    found = next((step for step in steps if (step - other_first) % other_period == 0), None)
    return None if found is None else (lcm(period, other_period), found)


def _check_step(exchanges: Sequence[Exchange], placement: Placement, segment: int) -> None:
    values = _own_contributions(placement)
    for exchange in exchanges:
        values = _after(exchange, values, placement, segment)
        lost = sorted(set(range(placement.size)) - _contributors(values))
        if lost:
            ranks = f"rank{'s' * (len(lost) > 1)} {some([str(rank) for rank in lost])}"
            collective, over = component_name(exchange.collective), component_name(exchange.over)
            raise ValueError(
                f"{exchange.name} does not fit {placement.size} ranks: after {collective} over {over} the gradients "
                f"of {ranks} are lost. Put an allreduce among the same ranks before it, or give all groups and "
                "leaders of the strategy the same size, count or by"
            )


def results(collective: Collective, values: Sequence[Hashable], leader: int) -> list[Hashable]:
    """Return each rank's result of a collective, as tokens that are equal where the bits are.

    A combined token is a tuple of the tokens of all ranks with a part in it.

    Args:
        collective: combines the values.
        values: a token for each rank's contribution.
        leader: the rank that leads the segment.
    """
    traits = collective.traits
    root = leader if traits.root is None else traits.root
    together = (collective, tuple(values))
    if traits.ends is Ends.SAME:
        return [together] * len(values)
    if traits.ends is Ends.COPY:
        return [values[root]] * len(values)
    if traits.ends is Ends.ROOT:
        return [together if rank == root else value for rank, value in enumerate(values)]
    return [(rank, together) for rank in range(len(values))]


def outer_holders(exchange: Exchange, placement: Placement, segment: int) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that hold equal outer parameters of a segment, each in the order of its ranks."""
    held = exchange.over.carriers(segment, placement)
    if exchange.collective.traits.ends is not Ends.OWN:
        return held
    # Mixed, or stepped by rounds that others have not reached yet.
    return tuple((rank,) for ranks in held for rank in ranks)


class _OwnValue(int):
    """The token of one rank's contribution: its number."""


def _own_contributions(placement: Placement) -> list[Hashable]:
    """Return the ranks' first tokens: each its own."""
    return [_OwnValue(rank) for rank in range(placement.size)]


def _roles(exchanges: Iterable[Exchange], placement: Placement) -> Iterator[int]:
    """Return numbers of segments that cover all roles: beyond them, carriers and leaders repeat."""
    return iter(range(lcm(*(exchange.over.num_roles(placement) for exchange in exchanges))))


def _after(
    exchange: Exchange, values: Sequence[Hashable], placement: Placement, segment: int
) -> list[Hashable]:
    """Return the tokens after an exchange, by rank, from those before it."""
    ended = list(values)
    for members in exchange.over.carriers(segment, placement):
        if not exchange.takes_place(len(members)):
            continue
        leader = exchange.over.leader(len(members), segment)
        ends = results(exchange.collective, [values[rank] for rank in members], leader)
        if exchange.keeps_own and exchange.compressor is not None and exchange.compressor.traits.leaves_out:
            ends = list(zip(members, ends, strict=True))
        for rank, result in zip(members, ends, strict=True):
            ended[rank] = result
    return ended


def _contributors(values: Iterable[Hashable]) -> set[int]:
    """Return the ranks whose contributions are in any of the tokens."""
    found, seen, left = set(), set(), list(values)
    while left:
        token = left.pop()
        if id(token) in seen:
            continue
        seen.add(id(token))  # many ranks hold one and the same
        if isinstance(token, _OwnValue):
            found.add(int(token))
        elif isinstance(token, tuple):
            left.extend(token)
    return found
