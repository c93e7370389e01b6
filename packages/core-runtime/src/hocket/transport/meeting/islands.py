"""The meeting of islands that are jobs of their own, before their ranks join as one job.

Launchers do not know of each other: islands may have other numbers of ranks, bear one number twice, or not come. Ranks'
numbers mean nothing before that is ruled out, so that each rank enters its island and its place there.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from hocket.errors import UserError
from hocket.transport.meeting.rendezvous import Rendezvous
from hocket.transport.status import number_ranks
from hocket.transport.waiting import wait

_COME, _HEARD = "islands", "islands heard"
# Hosts of one cluster start within less.
_FIRST_NOTICE_S, _NOTICE_EVERY_S = 5.0, 60.0
# The store ends with the rank that runs it, which leaves the others so long to read what is wrong: less than what they
# leave it to speak first (`last_word`).
_HEARING_S = 1.0


class Arrival(NamedTuple):
    """The facts of a rank about its island; JSON.

    Attributes:
        island: the island's number.
        place: the rank's among those of its island.
        ranks: number of the island's ranks.
        islands: number of islands, as this one has been told.
        host: the rank's host.
    """

    island: int
    place: int
    ranks: int
    islands: int
    host: str


def meet_islands(store: Store, rendezvous: Rendezvous) -> None:
    """Wait until all ranks of all islands have come; collective, and nothing without islands.

    Raises:
        UserError: islands have other numbers of ranks, or one number; names them.
        ExchangeTimeoutError: some did not come; names them.
    """
    if rendezvous.islands == 1:
        return
    ranks = rendezvous.size // rendezvous.islands
    own = Arrival(rendezvous.island, rendezvous.place, ranks, rendezvous.islands, socket.gethostname())
    store.set(f"{_COME}/{store.add(_COME, 1)}", json.dumps(own))
    come: list[Arrival] = []

    def all_have_come() -> bool:
        new = [f"{_COME}/{number}" for number in range(len(come) + 1, store.add(_COME, 0) + 1)]
        if new and store.check(new):
            come.extend(Arrival(*json.loads(entry)) for entry in store.multi_get(new))
            if fault := fault_of(come):
                _let_all_hear(store, rendezvous, come)
                raise UserError(fault)
        return len(come) == rendezvous.size

    def describe(outcome: str) -> str:
        return f"island {own.island} waits for {_missing(own, come)}, {outcome}: {rendezvous.how_to_come}"

    tell = telling(describe)

    def tell_once_an_island() -> None:
        if own.place == min((each.place for each in come if each.island == own.island), default=own.place):
            tell()

    wait(all_have_come, rendezvous.timeout_s, describe, check=tell_once_an_island)


def telling(describe: Callable[[str], str]) -> Callable[[], None]:
    """Return a function that, called again and again, prints after some seconds what is waited for, and each minute.

    Args:
        describe: returns the line, given a phrase on the time.
    """
    begun_s = time.monotonic()
    next_s = begun_s + _FIRST_NOTICE_S

    def tell() -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + _NOTICE_EVERY_S
            print(f"hocket: {describe(f'for {now_s - begun_s:.0f} s so far')}", file=sys.stderr, flush=True)

    return tell


def fault_of(come: Sequence[Arrival]) -> str:
    """Return why islands cannot be one job, naming them; empty if nothing is wrong so far."""
    seen: dict[tuple[int, int], Arrival] = {}
    for each in come:
        other = seen.setdefault((each.island, each.place), each)
        if other is not each:
            return (
                f"two jobs are island {each.island}, on {other.host} and on {each.host}: give each island a "
                f"HOCKET_ISLAND of its own, 0 to {each.islands - 1}"
            )
    islands = {each.island: each for each in reversed(come)}
    first, *others = (islands[number] for number in sorted(islands))
    if any(each.islands != first.islands for each in others):
        given = (f"island {each.island} on {each.host} has {each.islands}" for each in (first, *others))
        return f"the islands' HOCKET_ISLANDS differ ({', '.join(given)}): give all islands the same number"
    if any(each.ranks != first.ranks for each in others):
        given = (f"island {each.island} on {each.host} has {each.ranks}" for each in (first, *others))
        return (
            f"the islands differ in their numbers of ranks ({', '.join(given)}): start the same number of "
            "ranks on each island"
        )
    return ""


def _let_all_hear(store: Store, rendezvous: Rendezvous, come: Sequence[Arrival]) -> None:
    """Leave the other ranks time to find the fault, on the rank that runs the store."""
    heard = store.add(_HEARD, 1)
    expected = sum(ranks for _, ranks in {(each.island, each.ranks) for each in come})
    end_s = time.monotonic() + _HEARING_S
    while rendezvous.serves and heard < expected and time.monotonic() < end_s:
        time.sleep(0.05)
        heard = store.add(_HEARD, 0)


def _missing(own: Arrival, come: Sequence[Arrival]) -> str:
    """Return which islands, or ranks of them, have not come."""
    places = {island: [each.place for each in come if each.island == island] for island in range(own.islands)}
    absent = [island for island, there in places.items() if not there]
    parts = [number_ranks(absent, "island")] if absent else []
    for island, there in places.items():
        if there and (late := sorted(set(range(own.ranks)).difference(there))):
            parts.append(f"{number_ranks(late)} of {own.ranks} of island {island}")
    return " and ".join(parts)
