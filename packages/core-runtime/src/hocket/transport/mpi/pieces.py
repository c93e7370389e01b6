"""Arrays that are too large for one call of MPI, whose counts end at 2^31 - 1: sent and combined in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hocket.arrays import Array
from hocket.transport.host import Operation, ProcessLane
from hocket.transport.mpi.request import MPIRequest, begun
from hocket.transport.request import Request

__all__ = ["Pieces", "as_bytes", "cut", "cut_message", "fits", "gather_rows"]

#: Of one call; what is longer is cut.
MOST_BYTES = 1 << 30


def fits(data: Array) -> bool:
    """Return whether one call of MPI takes `data` whole, as a message too."""
    return data.nbytes < MOST_BYTES


def as_bytes(data: Array) -> Array:
    """Return `data`'s memory as flat uint8."""
    return data.reshape(-1).view(np.uint8)


def cut(data: Array) -> list[Array]:
    """Return `data` as flat pieces of at most `MOST_BYTES`; at least one."""
    flat, numel = data.reshape(-1), max(1, MOST_BYTES // data.itemsize)
    return [flat[start : start + numel] for start in range(0, max(flat.size, 1), numel)]


def cut_message(data: Array) -> list[Array]:
    """Return a message as pieces of `MOST_BYTES` and a shorter one, maybe empty, which says that it is the last.

    So a receiver that expects another length notices.
    """
    flat = as_bytes(data)
    return [flat[start : start + MOST_BYTES] for start in range(0, flat.size + 1, MOST_BYTES)]


class Pieces(Operation):
    """An operation that is done when all of its pieces are.

    Args:
        begin: begins a piece's, given its number.
        number: how many there are.
    """

    __slots__ = ("_requests",)

    def __init__(
        self,
        lane: ProcessLane,
        what: str,
        begin: Callable[[int], Request],
        number: int,
        *,
        other: int | None = None,
    ) -> None:
        super().__init__(lane, what, other)
        self._requests = [begin(piece) for piece in range(number)]

    def done(self) -> bool:
        self._requests = [request for request in self._requests if not request.done()]
        return not self._requests

    def withdraw(self) -> None:
        for request in reversed(self._requests):
            request.withdraw()
        self._requests = []


def gather_rows(lane: ProcessLane, comm: Any, what: str, rows: Sequence[Array]) -> Pieces:
    """Bring every rank's row to everyone, each broadcast by its rank.

    Args:
        rows: uint8, by rank, of the lengths that all know; this rank's holds what it gives.
    """
    calls = [(root, piece) for root, row in enumerate(rows) for piece in cut(row)]

    def begin(number: int) -> Request:
        root, piece = calls[number]
        return MPIRequest(lane, begun(lane, what, lambda: comm.Ibcast([piece, MPI.BYTE], root)), what, piece)

    return Pieces(lane, what, begin, len(calls))
