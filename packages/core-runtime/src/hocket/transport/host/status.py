"""A status board in memory that a host's ranks share, so that a stall report can name the cause.

A stopped or busy rank answers no message; its entry can be read all the same. An entry holds the time of its writing
(float64, seconds of the host's monotonic clock), the step and the state (int64), and the lane and the operation that
the rank waits for.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hocket.errors import PeerLostError, SessionLeftError, TransportError
from hocket.transport.gathering import Gather
from hocket.transport.host.descriptors import Descriptor
from hocket.transport.host.memory import reserve
from hocket.transport.status import (
    HEARD_AFTER_S,
    READS,
    RankState,
    RankStatus,
    Status,
    WaitSite,
    describe_stall,
    number_ranks,
    summarise,
)

_ENTRY = struct.Struct("=dqq64s64s")
#: So long all ranks of a host may read their loaders, in seconds, before a line says so.
READING_REPORT_AFTER_S = 25.0
_LOOKS_PER_REPORT = 6
_LOOK_AT_RANKS_EVERY_S = 0.1
# Behind the entry: the sessions that the rank has left last, when, and why.
_LEFT = struct.Struct("=qd232s")
_LEFT_OFFSET, _MOST_LEFT, _MOST_BYTES = 1024, 8, 232
# Of a session's number: its ranks are asked to end.
_ASKED = 1 << 40


class StatusBoard:
    """The entries of this host's ranks, one page each, in anonymous memory, which no killed rank leaves behind.

    Args:
        rank: this rank in the job.
        allgather: collective over all ranks of the job.
        room: from the number of other ranks on this host, returns the bytes of each one's memory that others may write.

    Attributes:
        ranks: the host's, numbered as in the job; one whose page cannot be seen has no entry.
        step: number of steps that this rank has ended.
        rooms: by rank, that memory of this rank and of those that see this one's and show theirs, uint8.
    """

    def __init__(self, rank: int, allgather: Gather, room: Callable[[int], int] = lambda others: 0) -> None:
        self.step = 0
        self._rank = rank
        self._num_left = 0
        self._watched = False
        host = _host()
        self.ranks = [other for other, theirs in enumerate(allgather(host)) if theirs == host]
        nbytes = mmap.PAGESIZE + room(len(self.ranks) - 1)
        own, _ = reserve("hocket-status", nbytes)
        try:
            descriptors = allgather(own and Descriptor.of(own))
            self._own = mmap.mmap(-1 if own is None else own, nbytes)
            self._pages = {
                other: page for other in self.ranks if (page := self._open(other, descriptors[other], nbytes))
            }
            self.write(RankState.COMPUTING)
            # From here on everybody has opened it, and has an entry.
            seen = allgather([*self._pages])
            mutual = {other: page for other, page in self._pages.items() if rank in seen[other]}
            self.rooms = {
                other: np.frombuffer(page, np.uint8)[mmap.PAGESIZE :]
                for other, page in {rank: self._own, **mutual}.items()
            }
        finally:
            if own is not None:
                os.close(own)

    def _open(self, rank: int, descriptor: Sequence[str] | None, nbytes: int) -> mmap.mmap | None:
        if rank == self._rank or descriptor is None:
            return None
        try:
            number = Descriptor(*descriptor).open(os.O_RDWR)
        except OSError:
            return None  # a container, or a user, of its own
        try:
            return mmap.mmap(number, nbytes)
        finally:
            os.close(number)

    def write(self, state: RankState, lane: str = "", what: str = "") -> None:
        """Show this rank's state from now on."""
        place = (lane.encode()[:64], what.encode()[:64])
        # Not `pack_into`, which fills the entry with zeros first: another rank may read it at any time.
        self._own[: _ENTRY.size] = _ENTRY.pack(time.monotonic(), self.step, state, *place)

    def watch_reading(self) -> None:
        """Let the host's first rank report, from a thread, that all of its ranks have long read their loaders."""
        if not self._watched and self._rank == min(self.ranks):
            threading.Thread(target=self._watch_reading, name="hocket loaders", daemon=True).start()
        self._watched = True

    def _watch_reading(self) -> None:
        reported_s = 0.0
        while True:
            time.sleep(READING_REPORT_AFTER_S / _LOOKS_PER_REPORT)
            rows = [_read(page, rank) for rank, page in {self._rank: self._own, **self._pages}.items()]
            reading = [row for row in rows if row.state is not RankState.LEAVING]
            if not all(row.what == READS for row in reading):
                continue
            since_s = max((row.since_s for row in reading), default=reported_s)
            if since_s != reported_s and time.monotonic() - since_s > READING_REPORT_AFTER_S:
                reported_s = since_s
                print(_describe_reading(reading), file=sys.stderr, flush=True)

    def publish_lasting_state(self) -> None:
        """Send this rank's state to other hosts, if it has lasted; a wait calls it now and then."""

    def leave(self, session: int, why: str) -> None:
        """Show that this rank has left a session, for good."""
        place = _LEFT_OFFSET + self._num_left % _MOST_LEFT * _LEFT.size
        self._num_left += 1
        left = _LEFT.pack(session, time.monotonic(), why.encode()[:_MOST_BYTES])
        # The number last: it says that the rest is there.
        self._own[place + 8 : place + _LEFT.size] = left[8:]
        self._own[place : place + 8] = left[:8]

    def left(self, session: int, after_s: float = HEARD_AFTER_S) -> tuple[int, str] | None:
        """Return a rank that left a session at least `after_s` seconds ago, and the reason; else None."""
        latest_s = time.monotonic() - after_s
        for rank, page in self._pages.items():
            for number in range(_MOST_LEFT):
                named, since_s, why = _LEFT.unpack_from(page, _LEFT_OFFSET + number * _LEFT.size)
                if named == session and since_s < latest_s:
                    return rank, _text(why)
        return None

    def own(self) -> RankStatus:
        """Return this rank's entry."""
        return _read(self._own, self._rank)

    def others(self) -> list[RankStatus]:
        """Return the other ranks' entries, by rank."""
        return [_read(page, rank) for rank, page in sorted(self._pages.items())]


def _host() -> str:
    """Return an identifier of this host, equal for its processes alone."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def _read(page: mmap.mmap, rank: int) -> RankStatus:
    since_s, step, state, lane, what = _ENTRY.unpack_from(page, 0)
    return RankStatus(rank, since_s, step, RankState(state), _text(lane), _text(what))


def _describe_reading(rows: Sequence[RankStatus]) -> str:
    """Return the report on ranks of which each waits for its own loader, and so nobody for another rank."""
    ago_s = time.monotonic() - max(row.since_s for row in rows)
    read = "has been reading its data loader" if len(rows) == 1 else "have been reading their data loaders"
    steps = sorted({row.step for row in rows})
    where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    who = number_ranks([row.rank for row in rows])
    return f"hocket: {who} {read} for {ago_s:.0f} s, {where}: training goes on with the next batch"


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


class Failures:
    """The dead ranks of the job, as far as the transport can tell; here none."""

    _next_look_s = 0.0

    def dead(self) -> list[int]:
        """Return the ranks of the job that have died, in the order of detection; never blocks."""
        return []

    def check(self, where: Callable[[], str]) -> None:
        """Check that no rank has died, at most ten times a second.

        Args:
            where: a phrase on this rank and its wait, for the error.

        Raises:
            PeerLostError: a rank has died.
        """
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_AT_RANKS_EVERY_S
            dead = self.dead()
            if dead:
                raise self.lost(where(), dead)

    def explain(self, where: str, error: Exception) -> TransportError:
        """Return an error for one of the transport's own: PeerLostError if a rank has died."""
        dead = self.dead()
        return self.lost(where, dead) if dead else TransportError(f"{where}: {error}")

    def lost(self, where: str, dead: Sequence[int]) -> PeerLostError:
        """Return the error of a rank that other ranks' deaths end; `where` is a phrase on its wait."""
        return PeerLostError(f"{where}: {number_ranks(dead)} {'has' if len(dead) == 1 else 'have'} died")


class HostStatus(Status):
    """The status of a group's ranks on this host, and the dead ranks of the job.

    Args:
        rank: this rank, numbered as in the job.
        ranks: the group's, numbered as in the job.
        board: of this host's ranks; None where there is none.
        failures: the dead among the job's ranks.
        session: the board's key of the group's session; 0 for none.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        board: StatusBoard | None,
        failures: Failures,
        session: int = 0,
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self.board, self.failures, self.session = board, failures, session
        self._next_look_s = 0.0

    @property
    def spans_hosts(self) -> bool:
        """Tell whether some of the group's ranks are on another host, as far as this one can tell."""
        return self.board is None or not set(self._ranks) <= set(self.board.ranks)

    def others(self) -> list[RankStatus]:
        """Return the known states of the group's other ranks: at least those of this host."""
        return [] if self.board is None else [row for row in self.board.others() if row.rank in self._ranks]

    def note_waiting(self, what: str, lane: str) -> None:
        if self.board is not None:
            self.board.write(RankState.WAITING, lane, what)

    def note_computing(self, what: str = "") -> None:
        if self.board is not None:
            self.board.write(RankState.COMPUTING, what=what)
            if what == READS:
                self.board.watch_reading()

    def note_step(self, step: int) -> None:
        if self.board is not None:
            self.board.step = step
            self.board.write(RankState.COMPUTING)

    def describe(self) -> str:
        others = self.others()
        elsewhere = len(self._unknown(others)) if self.board is not None else 0
        parts = [summarise(others), f"{elsewhere} ranks are on other hosts" if elsewhere else ""]
        return "; ".join(filter(None, parts))

    def _unknown(self, others: Sequence[RankStatus]) -> set[int]:
        """Return the group's ranks with unknown states."""
        return set(self._ranks) - {self._rank} - {row.rank for row in others}

    def describe_stall(self, site: WaitSite, outcome: str) -> str:
        """Return a sentence on this rank's long wait at `site`."""
        return describe_stall(self._rank, site, self.others(), outcome)

    def ask_to_end(self) -> None:
        if self.board is not None:
            self.board.leave(self.session | _ASKED, "was asked to end")

    def is_asked_to_end(self) -> bool:
        return self.board is not None and self.board.left(self.session | _ASKED, after_s=0.0) is not None

    def check_lost(self) -> None:
        self.check(lambda: f"rank {self._rank}")

    def check(self, where: Callable[[], str]) -> None:
        """Check that no rank has died or left the session; `where` is a phrase on this rank and its wait.

        Raises:
            PeerLostError: a rank has.
        """
        self.failures.check(where)
        now_s = time.monotonic()
        if self.session and self.board is not None and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_AT_RANKS_EVERY_S
            left = self.board.left(self.session)
            if left is not None:
                raise SessionLeftError(f"{where()}: rank {left[0]} {left[1]}")

    def is_waited_for(self, lane: str, seconds: float) -> bool:
        """Return whether all others, after as many steps, have long waited elsewhere.

        Args:
            lane: where this rank waits.
            seconds: the least time that the others must have waited.
        """
        others = self.others()
        elsewhere = [row for row in others if row.state is RankState.WAITING and row.lane != lane]
        # Somebody of whom nothing is known may compute.
        if self.board is None or self._unknown(others) or not elsewhere:
            return False
        step, since_s = self.board.step, max(row.since_s for row in elsewhere)
        return (
            all(row.state is not RankState.COMPUTING for row in others)
            and all(row.step >= step for row in elsewhere)
            and time.monotonic() - since_s > seconds
        )
