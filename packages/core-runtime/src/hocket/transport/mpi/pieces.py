"""Arrays that are too large for one call of MPI, with counts up to 2^31 - 1, in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from hocket.arrays import Array, as_bytes
from hocket.transport.request import Request

#: Of one call; what is longer is cut.
MOST_BYTES = 1 << 30


def fits(data: Array) -> bool:
    """Return whether one call of MPI can take `data` whole, also as a message."""
    return data.nbytes < MOST_BYTES


def cut(data: Array) -> list[Array]:
    """Return `data` as flat pieces of at most `MOST_BYTES`; at least one."""
    flat, numel = data.reshape(-1), max(1, MOST_BYTES // data.itemsize)
    return [flat[start : start + numel] for start in range(0, max(flat.size, 1), numel)]


def cut_message(data: Array) -> list[Array]:
    """Return a message as pieces of `MOST_BYTES` and a shorter one, maybe empty, which marks the end.

    So a receiver that expects another length notices the difference.
    """
    flat = as_bytes(data)
    return [flat[start : start + MOST_BYTES] for start in range(0, flat.size + 1, MOST_BYTES)]


def together(pieces: Iterable[Request]) -> Request:
    """Return a request that is done when all of its pieces are."""
    return Request.all_of(pieces).then(lambda _: None)
