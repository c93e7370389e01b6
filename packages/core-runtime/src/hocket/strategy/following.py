"""What each rank ends an exchange with, as tokens that are followed from rank to rank; nothing is sent."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from hocket.strategy.exchange import Exchange
from hocket.strategy.placement import Placement

__all__ = ["Contribution", "after", "contributors", "own_contributions", "roles"]


@dataclass(frozen=True)
class Contribution:
    """The token of what one rank contributes."""

    rank: int


def own_contributions(placement: Placement) -> list[Hashable]:
    """Return what the ranks begin with: each its own."""
    return [Contribution(rank) for rank in range(placement.size)]


def roles(exchanges: Iterable[Exchange], placement: Placement) -> Iterator[int]:
    """Return numbers of segments: after the last, who carries and leads them repeats."""
    return iter(range(lcm(*(exchange.over.num_roles(placement) for exchange in exchanges))))


def after(
    exchange: Exchange, values: Sequence[Hashable], placement: Placement, segment: int
) -> list[Hashable]:
    """Return what the ranks end an exchange with, by rank, of what they begin it with."""
    ended = list(values)
    for part in exchange.over.parts(placement):
        members = [rank for rank in part if exchange.over.carries(rank, segment, placement)]
        if len(members) < 2:
            continue
        leader = exchange.over.leader(len(members), segment)
        results = exchange.collective.results([values[rank] for rank in members], leader)
        for rank, result in zip(members, results, strict=True):
            ended[rank] = result
    return ended


def contributors(values: Iterable[Hashable]) -> set[int]:
    """Return the ranks whose contributions are in any of the tokens."""
    found, seen, left = set(), set(), list(values)
    while left:
        token = left.pop()
        if id(token) in seen:
            continue
        seen.add(id(token))  # many ranks hold one and the same
        if isinstance(token, Contribution):
            found.add(token.rank)
        elif isinstance(token, tuple):
            left.extend(token)
    return found
