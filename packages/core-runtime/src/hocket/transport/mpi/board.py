"""What every rank of a host is doing, in memory that they share, so that a stall report can name the culprit.

A stopped or busy rank answers no message; its row can be read all the same. A row holds when it was written
(float64, seconds of the host's monotonic clock), the step and the state (int64), and the lane and the
operation that it waits for.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

__all__ = ["Board", "Row", "State"]

_ROW = struct.Struct("=dqq64s64s")
# A multiple of a cache line, so that no two ranks write to the same one.
_ROW_BYTES = 192


class State(IntEnum):
    """What a rank is doing."""

    COMPUTING = 0
    WAITING = 1
    LEAVING = 2
    FAILED = 3
    #: A wait lasted too long, which is rather another rank's fault than this one's.
    GAVE_UP = 4
    #: It tells why the job ends, and ends it.
    TELLING = 5


@dataclass(frozen=True)
class Row:
    """What one rank said of itself last.

    Attributes:
        rank: its number in the job.
        since_s: when it said so.
        step: how many steps it has done.
        state: what it does.
        lane: where it waits, or waited when it gave up.
        what: for which operation.
    """

    rank: int
    since_s: float
    step: int
    state: State
    lane: str = ""
    what: str = ""

    @property
    def place(self) -> str:
        """Where it waits, and for what."""
        return f"{self.lane} ({self.what})" if self.lane else ""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for others, or did when it gave up."""
        return self.state in (State.WAITING, State.GAVE_UP)

    def waits_in(self, lane: str) -> bool:
        """Return whether it waits in `lane`."""
        return self.is_waiting and self.lane == lane

    def doing(self) -> str:
        """Return what the rank does, for how long and in which step, as the end of a sentence."""
        doing = {
            State.COMPUTING: "computing, in no exchange,",
            State.WAITING: f"waiting in {self.place}",
            State.LEAVING: "at the end of its script",
            State.FAILED: "failing",
            State.GAVE_UP: f"giving up on {self.place}",
            State.TELLING: "ending the job",
        }[self.state]
        return f"{doing} for {time.monotonic() - self.since_s:.0f} s, step {self.step}"


class Board:
    """The rows of this host's ranks.

    Args:
        comm: an mpi4py communicator over all ranks of the job; collective.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        # World ranks of the host's ranks, by host rank.
        self.ranks: list[int] = self._host.allgather(comm.rank)
        self._window = MPI.Win.Allocate_shared(_ROW_BYTES, 1, comm=self._host)
        memories: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(self._host.size)]
        self._rows = [memoryview(memory).cast("B") for memory in memories]
        self._own = self._rows[self._host.rank]
        self._rank = comm.rank
        self.step = 0
        self.write(State.COMPUTING)

    def write(self, state: State, lane: str = "", what: str = "") -> None:
        """Say what this rank is doing from now on."""
        place = (lane.encode()[:64], what.encode()[:64])
        # Not `pack_into`, which fills the row with zeros first: another rank may read it at any time.
        self._own[: _ROW.size] = _ROW.pack(time.monotonic(), self.step, state, *place)

    def own(self) -> Row:
        """Return this rank's row."""
        return _read(self._own, self._rank)

    def others(self) -> list[Row]:
        """Return the other ranks' rows, by rank."""
        rows = map(_read, self._rows, self.ranks)
        return sorted((row for row in rows if row.rank != self._rank), key=lambda row: row.rank)

    def close(self) -> None:
        """Give the shared memory back; collective."""
        self._rows.clear()
        self._window.Free()
        self._host.Free()


def _read(memory: memoryview, rank: int) -> Row:
    since_s, step, state, lane, what = _ROW.unpack_from(memory, 0)
    return Row(rank, since_s, step, State(state), _text(lane), _text(what))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
