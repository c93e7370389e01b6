"""What one rank does of an exchange that all ranks work on: its share of everybody's elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hocket.transport.peer import Array, Terms
from hocket.transport.reduction import TreeSum

__all__ = ["mix_share", "share_of", "sum_share"]

_CACHE_LINE_BYTES = 64


def share_of(array: Array, position: int, size: int) -> slice:
    """Return the elements of `array` that are number `position`'s of `size` to work on: whole cache lines."""
    lines = -(-array.nbytes // (size * _CACHE_LINE_BYTES))
    numel = lines * _CACHE_LINE_BYTES // array.itemsize
    return slice(min(position * numel, array.size), min((position + 1) * numel, array.size))


def sum_share(rank: int, total: TreeSum, sends: Sequence[Array], receives: Sequence[Array]) -> list[int]:
    """Write the sum of all `sends` into all `receives`, for the elements of this rank's share.

    Args:
        rank: this rank.
        total: for so many arrays of this dtype.
        sends: every rank's, by rank, [n].
        receives: every rank's, by rank, [n]; each its `send`, or other memory.
    """
    own = share_of(sends[0], rank, len(sends))
    total([send[own] for send in sends], *(receive[own] for receive in receives))
    return []


def mix_share(rank: int, terms: Terms, data: Mapping[int, Array], outs: Mapping[int, Array]) -> list[int]:
    """Write everybody's weighted sum, for the elements of this rank's share among those that `terms` names.

    Args:
        rank: this rank.
        terms: as in `Lane.imix`.
        data: of each rank in `terms`, [n] floats.
        outs: of each rank in `terms`; each its `data`, or other memory.

    Returns:
        The ranks whose `data` holds NaN or Inf in this share.
    """
    from hocket.kernels import mix

    members = sorted(terms)
    position = {member: i for i, member in enumerate(members)}
    own = share_of(data[rank], position[rank], len(members))
    nonfinite = mix(
        [data[member][own] for member in members],
        [outs[member][own] for member in members],
        [[(position[source], weight) for source, weight in terms[member]] for member in members],
    )
    return [members[i] for i in nonfinite]
