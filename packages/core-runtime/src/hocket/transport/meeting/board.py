"""The status board of a job over several hosts: the store holds the entries of ranks on other hosts.

A wait is stored after a second; each step, and states at the job's end, at once. On one host nothing is stored.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hocket.transport.gathering import Gather
from hocket.transport.host import StatusBoard
from hocket.transport.status import HEARD_AFTER_S, RankState, RankStatus

if TYPE_CHECKING:
    from hocket.transport.meeting.store import StoreEntries  # which imports torch

_TELL_AFTER_S = 1.0
_READ_EVERY_S = 0.5
# Not sooner in a wait, too: of thousands of ranks each asks.
_ASK_EVERY_S = 1.5


class JobBoard(StatusBoard):
    """The entries of all ranks of a job; collective.

    Args:
        rank: this rank in the job.
        size: number of ranks.
        allgather: collective over all of them.
        store: all ranks'.
        room: as of `StatusBoard`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        allgather: Gather,
        store: StoreEntries,
        room: Callable[[int], int] = lambda others: 0,
    ) -> None:
        self._store = store
        self._read_s = -math.inf
        self._asked_s, self._heard = time.monotonic(), 0
        self._shown = RankStatus(rank, time.monotonic(), 0, RankState.COMPUTING)
        self._elsewhere: list[int] = []
        self._read: list[RankStatus] = []
        store.set(_key(rank), _entry(self._shown))
        super().__init__(rank, allgather, room)
        self._elsewhere = [other for other in range(size) if other != rank and other not in self._pages]

    def write(self, state: RankState, lane: str = "", what: str = "") -> None:
        super().write(state, lane, what)
        brief = state is RankState.WAITING or (state, self.step) == (
            self._shown.state,
            self._shown.step,
        )
        if self._elsewhere and not brief:
            self._publish()

    def publish_lasting_state(self) -> None:
        """Send this rank's state to other hosts, if it has lasted."""
        if self._elsewhere:
            own = self.own()
            if own.since_s != self._shown.since_s and time.monotonic() - own.since_s > _TELL_AFTER_S:
                self._publish()

    def leave(self, session: int, why: str) -> None:
        super().leave(session, why)
        if self._elsewhere:
            self._store.set(_left_key(session), json.dumps([self._rank, why]))

    def left(self, session: int, after_s: float = HEARD_AFTER_S) -> tuple[int, str] | None:
        found = super().left(session, after_s)
        if found is None and self._elsewhere and time.monotonic() - self._asked_s > _ASK_EVERY_S:
            self._asked_s = time.monotonic()
            # By the next question the rank itself has had time to end the job.
            heard = self._heard == session or not after_s
            self._heard = session if self._store.has(_left_key(session)) else 0
            if heard and self._heard and (entries := self._store.get([_left_key(session)])):
                rank, why = json.loads(entries[0])
                return rank, why
        return found

    def _publish(self) -> None:
        self._shown = self.own()
        self._store.set(_key(self._rank), _entry(self._shown))

    def unheard(self) -> list[int]:
        """Return the ranks with unknown states, as the store ended with the rank that ran it."""
        return self._elsewhere if self._store.gone else []

    def others(self) -> list[RankStatus]:
        if self._elsewhere and time.monotonic() - self._read_s > _READ_EVERY_S:
            entries = self._store.get([_key(rank) for rank in self._elsewhere])
            self._read = [_row(rank, entry) for rank, entry in zip(self._elsewhere, entries, strict=False)]
            self._read_s = time.monotonic()
        return sorted([*super().others(), *self._read], key=lambda row: row.rank)


def _key(rank: int) -> str:
    return f"status/{rank}"


def _left_key(session: int) -> str:
    return f"left/{session}"


def _entry(row: RankStatus) -> str:
    since_s = time.time() - (time.monotonic() - row.since_s)
    return json.dumps([since_s, row.step, row.state, row.lane, row.what])


def _row(rank: int, entry: bytes) -> RankStatus:
    since_s, step, state, lane, what = json.loads(entry)
    ago_s = max(0.0, time.time() - since_s)  # another host's clock
    return RankStatus(rank, time.monotonic() - ago_s, step, RankState(state), lane, what)
