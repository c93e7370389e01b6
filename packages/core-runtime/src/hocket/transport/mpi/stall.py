"""What a rank that waits too long says: for whom it waits, what that one does, and who waits as it does."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from hocket.transport.mpi.board import Row, State

__all__ = ["describe_stall", "number_ranks", "summarise"]

_MOST_NAMED = 8


def describe_stall(
    rank: int, place: tuple[str, str], awaited: Collection[int], rows: Sequence[Row], outcome: str
) -> str:
    """Return a sentence on a wait that does not end; whom it is for comes first.

    Args:
        rank: who waits.
        place: the lane, and the operation in it.
        awaited: the ranks without which the operation cannot end: one for a message, else all others.
        rows: what is known of the other ranks of the group, those of this host.
        outcome: how long it has lasted or what becomes of it, for instance `no end after 5 s`.
    """
    lane, what = place
    known = {row.rank: row for row in rows}
    collective = len(awaited) > 1 or what in ("allreduce", "barrier", "allgather")
    arrived = [r for r in awaited if collective and r in known and known[r].is_waiting_in(lane)]
    missing = [r for r in awaited if r not in arrived]
    # Who neither waits nor is awaited may hold up the one that is.
    idle = [row for row in rows if row.rank not in awaited and not row.is_waiting]
    parts = [f"rank {rank} waits for {number_ranks(missing or awaited)} in {lane} ({what}): {outcome}"]
    parts += [f"rank {r} has not arrived: {known[r].doing()}" for r in missing[:_MOST_NAMED] if r in known]
    elsewhere = [r for r in missing if r not in known]
    if elsewhere:
        parts.append(f"{number_ranks(elsewhere)} on another host, where this one cannot look")
    parts += [f"rank {row.rank} is {row.doing()}" for row in idle[:_MOST_NAMED]]
    if arrived:
        parts.append(f"{number_ranks(arrived)} wait{'s' * (len(arrived) == 1)} there too")
    return "; ".join(parts)


def summarise(rows: Iterable[Row]) -> str:
    """Return what ranks do, those together that wait for the same: `ranks 1, 3 wait in a (barrier) for 5 s`."""
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
