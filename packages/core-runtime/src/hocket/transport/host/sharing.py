"""What one rank does of an exchange that all ranks work on: its share of everybody's elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.transport.host.memory import Shared
from hocket.transport.peer import Array, Terms
from hocket.transport.reduction import TreeSum

__all__ = ["share_of", "share_of_mixes", "sum_share"]

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


def share_of_mixes(rank: int, mixes: Sequence[tuple[Shared, Shared, Terms]]) -> Callable[[], set[int]]:
    """Return a function that writes everybody's weighted sums, for this rank's shares of the elements.

    Args:
        rank: this rank, one of those in each `terms`.
        mixes: of each what everybody gives, [n] floats; where each rank's sum goes, its own of these or other memory;
            and the terms, as in `Lane.imix`, whose ranks share the work.

    Returns:
        To be called once; returns the ranks whose values hold NaN or Inf in these shares.
    """
    from hocket.kernels import Mix, Sums

    givers: list[int] = []
    sums = []
    for values, outs, terms in mixes:
        members = sorted(terms)
        position = {member: i for i, member in enumerate(members)}
        own_array = values.views[rank]
        own = share_of(own_array, position[rank], len(members))
        start = own.start * own_array.itemsize
        sums.append(
            Sums(
                [values.addresses[member] + start for member in members],
                [outs.addresses[member] + start for member in members],
                [[(position[source], weight) for source, weight in terms[member]] for member in members],
                own.stop - own.start,
            )
        )
        givers += members
    mix = Mix(sums, mixes[0][0].views[rank].dtype)
    return lambda: {givers[i] for i in mix()}
