"""What every rank of a host is doing, in memory that they share, so that a stall report can say whom it waits for.

A stopped or busy rank answers no message; its row can be read all the same. One row is 128 bytes: when it was
written (float64, seconds of the host's monotonic clock), the step (int64), the state (int64), and a text.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

__all__ = ["Board", "Row", "State"]

_ROW = struct.Struct("=dqqq96s")
_ROW_BYTES = 128


class State(IntEnum):
    """What a rank is doing."""

    COMPUTING = 0
    WAITING = 1
    LEAVING = 2
    FAILED = 3


@dataclass(frozen=True)
class Row:
    """What one rank said of itself last."""

    rank: int
    since_s: float
    step: int
    state: State
    text: str

    def __str__(self) -> str:
        ago_s = time.monotonic() - self.since_s
        doing = {
            State.COMPUTING: "computing, in no exchange,",
            State.WAITING: f"waiting in {self.text}",
            State.LEAVING: "at the end of its script",
            State.FAILED: "failing",
        }[self.state]
        return f"rank {self.rank} has been {doing} for {ago_s:.0f} s (step {self.step})"


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
        self._rows = [memoryview(self._window.Shared_query(r)[0]).cast("B") for r in range(self._host.size)]
        self._own = self._rows[self._host.rank]
        self._rank = comm.rank
        self.step = 0
        self.write(State.COMPUTING)

    def write(self, state: State, text: str = "") -> None:
        """Say what this rank is doing from now on."""
        _ROW.pack_into(self._own, 0, time.monotonic(), self.step, state, self._rank, text.encode()[:96])

    def others(self) -> list[Row]:
        """Return the other ranks' rows, by rank."""
        rows = []
        for memory in self._rows:
            since_s, step, state, rank, text = _ROW.unpack_from(memory, 0)
            if rank != self._rank:
                rows.append(Row(rank, since_s, step, State(state), text.rstrip(b"\0").decode(errors="replace")))
        return sorted(rows, key=lambda row: row.rank)

    def close(self) -> None:
        """Give the shared memory back; collective."""
        self._rows.clear()
        self._window.Free()
        self._host.Free()
