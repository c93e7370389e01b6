"""What a rank that waits too long says: for whom it waits, what that one does, and who waits as it does."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hocket.transport.mpi.board import Row, State

__all__ = ["Place", "describe_stall", "number_ranks", "summarise"]

_MOST_NAMED = 8


@dataclass(frozen=True)
class Place:
    """What a rank waits for.

    Attributes:
        lane: the lane's name.
        what: the operation in it, for instance `allreduce`.
        awaited: the ranks, numbered as in the whole job, without which it cannot end.
        together: whether all wait for all, so that who waits there too is not to blame.
    """

    lane: str
    what: str
    awaited: Collection[int]
    together: bool


def describe_stall(rank: int, place: Place, rows: Sequence[Row], outcome: str) -> str:
    """Return a sentence on a wait that does not end; whom it is for comes first.

    Args:
        rank: who waits, numbered as in the whole job.
        place: where.
        rows: what is known of the other ranks of the group, those of this host.
        outcome: how long it has lasted or what becomes of it, for instance `no end after 5 s`.
    """
    known = {row.rank: row for row in rows}
    there = [r for r in place.awaited if place.together and r in known and known[r].waits_in(place.lane)]
    missing = [r for r in place.awaited if r not in there]
    whom = number_ranks(missing or place.awaited)
    parts = [f"rank {rank} waits for {whom} in {place.lane} ({place.what}): {outcome}"]
    verb = "has not arrived:" if place.together else "is"
    parts += [f"rank {r} {verb} {known[r].doing()}" for r in missing[:_MOST_NAMED] if r in known]
    elsewhere = [r for r in missing if r not in known]
    if elsewhere:
        be = "is" if len(elsewhere) == 1 else "are"
        parts.append(f"{number_ranks(elsewhere)} {be} on another host, where this one cannot look")
    # Who is in no exchange at all may hold up the one that is awaited.
    idle = [row for row in rows if row.rank not in place.awaited and not row.is_waiting]
    parts += [f"rank {row.rank} is {row.doing()}" for row in idle[:_MOST_NAMED]]
    if there:
        parts.append(f"{number_ranks(there)} {'waits' if len(there) == 1 else 'wait'} there too")
    return "; ".join(parts)


def summarise(rows: Iterable[Row]) -> str:
    """Return what ranks do; those that wait for the same stand together."""
    by_place: dict[str, list[Row]] = {}
    for row in rows:
        alone = "" if row.state is State.WAITING else str(row.rank)
        by_place.setdefault(f"{row.place} {alone}", []).append(row)
    now_s = time.monotonic()
    parts = []
    for same in by_place.values():
        if same[0].state is State.WAITING:
            who, verb = number_ranks([row.rank for row in same]), "waits" if len(same) == 1 else "wait"
            ago_s = now_s - min(row.since_s for row in same)
            parts.append(f"{who} {verb} in {same[0].place} for {ago_s:.0f} s")
        else:
            parts.append(f"rank {same[0].rank} is {same[0].doing()}")
    return "; ".join(parts)


def number_ranks(ranks: Collection[int]) -> str:
    """Return `rank 2`, or `ranks 1, 3`; beyond some, only how many more."""
    listed = sorted(ranks)
    named = ", ".join(map(str, listed[:_MOST_NAMED]))
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return ("rank " if len(listed) == 1 else "ranks ") + named + more
