"""The ranks' states, as they show them to each other, and their descriptions in stall reports."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

#: What a rank that leaves a session is given, in seconds, to end the job itself.
HEARD_AFTER_S = 1.0

#: What a rank shows while it waits for its loader.
READS = "reading its data loader"

_MOST_NAMED = 8


class Status:
    """A status of a rank alone: it notes nothing and knows no other rank."""

    def note_waiting(self, what: str, lane: str) -> None:
        """Show the other ranks that this one waits in `lane` for `what`; takes a microsecond."""

    def note_computing(self, what: str = "") -> None:
        """Show the other ranks that this one computes again, or does `what`; takes a microsecond."""

    def note_step(self, step: int) -> None:
        """Show the other ranks the number of steps that this one has ended; takes a microsecond."""

    def describe(self) -> str:
        """Return the known states of the other ranks, for a stall report: which compute, wait or are gone."""
        return ""

    def ask_to_end(self) -> None:
        """Show the other ranks that this one was asked to save and end."""

    def is_asked_to_end(self) -> bool:
        """Return whether another rank was asked to save and end; called once a second."""
        return False

    def check_lost(self) -> None:
        """Check that all ranks of the job live; waits without a request call it now and then.

        Raises:
            PeerLostError: a rank has died; names it.
        """


class RankState(IntEnum):
    """The state of a rank."""

    COMPUTING = 0
    WAITING = 1
    LEAVING = 2
    FAILED = 3
    #: A wait lasted too long, which is rather another rank's fault than this one's.
    GAVE_UP = 4
    #: It tells why the job ends, and ends it.
    TELLING = 5


@dataclass(frozen=True)
class RankStatus:
    """The last state that a rank has shown.

    Attributes:
        rank: its number in the job.
        since_s: the time since when it is so, in seconds.
        step: number of steps that it has ended.
        state: its state.
        lane: the lane that it waits in, or waited in when it gave up.
        what: the operation that it waits for, or what it does instead of computing.
    """

    rank: int
    since_s: float
    step: int
    state: RankState
    lane: str = ""
    what: str = ""

    @property
    def place(self) -> str:
        """Return the lane and the operation that it waits for."""
        return f"{self.lane} ({self.what})" if self.lane else ""

    @property
    def is_waiting(self) -> bool:
        """Tell whether it waits for others, or did when it gave up."""
        return self.state in (RankState.WAITING, RankState.GAVE_UP)

    def waits_in(self, lane: str) -> bool:
        """Return whether it waits in `lane`."""
        return self.is_waiting and self.lane == lane

    def doing(self) -> str:
        """Return the rank's state, its duration and its step, as the end of a sentence."""
        doing = {
            RankState.COMPUTING: f"{self.what or 'computing'}, in no exchange,",
            RankState.WAITING: f"waiting in {self.place}",
            RankState.LEAVING: "at the end of its script",
            RankState.FAILED: "failing",
            RankState.GAVE_UP: f"giving up on {self.place}",
            RankState.TELLING: "ending the job",
        }[self.state]
        return f"{doing} for {time.monotonic() - self.since_s:.0f} s, step {self.step}"


@dataclass(frozen=True)
class WaitSite:
    """The operation that a rank waits for, and the ranks that it needs.

    Attributes:
        lane: the lane's name.
        what: the operation in it, for instance `allreduce`.
        awaited: the ranks, numbered as in the whole job, without which it cannot end.
        together: whether all wait for all, so that a rank that waits there too is not the cause.
    """

    lane: str
    what: str
    awaited: Collection[int]
    together: bool


def describe_stall(rank: int, site: WaitSite, rows: Sequence[RankStatus], outcome: str) -> str:
    """Return a sentence on a long wait, with the awaited ranks first.

    Args:
        rank: the waiting rank, numbered as in the whole job.
        site: the operation that it waits for.
        rows: known states of the other ranks of the group, those of this host.
        outcome: the wait's length or end, for instance `no end after 5 s`.
    """
    known = {row.rank: row for row in rows}
    there = [r for r in site.awaited if site.together and r in known and known[r].waits_in(site.lane)]
    missing = [r for r in site.awaited if r not in there]
    whom = number_ranks(missing or site.awaited)
    parts = [f"rank {rank} waits for {whom} in {site.lane} ({site.what}): {outcome}"]
    verb = "has not arrived:" if site.together else "is"
    parts += [f"rank {r} {verb} {known[r].doing()}" for r in missing[:_MOST_NAMED] if r in known]
    elsewhere = [r for r in missing if r not in known]
    if elsewhere:
        be = "is" if len(elsewhere) == 1 else "are"
        parts.append(f"{number_ranks(elsewhere)} {be} on another host, whose state is not known here")
    # A rank in no exchange at all may hold up the awaited one.
    idle = [row for row in rows if row.rank not in site.awaited and not row.is_waiting]
    parts += [f"rank {row.rank} is {row.doing()}" for row in idle[:_MOST_NAMED]]
    if there:
        parts.append(f"{number_ranks(there)} {'waits' if len(there) == 1 else 'wait'} there too")
    return "; ".join(parts)


def summarise(rows: Iterable[RankStatus]) -> str:
    """Return the ranks' states, with ranks that wait for the same operation together."""
    by_place: dict[str, list[RankStatus]] = {}
    for row in rows:
        alone = "" if row.state is RankState.WAITING else str(row.rank)
        by_place.setdefault(f"{row.place} {alone}", []).append(row)
    now_s = time.monotonic()
    parts = []
    for same in by_place.values():
        if same[0].state is RankState.WAITING:
            who, verb = number_ranks([row.rank for row in same]), "waits" if len(same) == 1 else "wait"
            ago_s = now_s - min(row.since_s for row in same)
            parts.append(f"{who} {verb} in {same[0].place} for {ago_s:.0f} s")
        else:
            parts.append(f"rank {same[0].rank} is {same[0].doing()}")
    return "; ".join(parts)


def number_ranks(ranks: Collection[int], noun: str = "rank") -> str:
    """Return `rank 2`, or `ranks 1, 3`, or what else `noun` names; of many, only the number of further ones."""
    listed = sorted(ranks)
    named = ", ".join(map(str, listed[:_MOST_NAMED]))
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return f"{noun}{'' if len(listed) == 1 else 's'} {named}{more}"
