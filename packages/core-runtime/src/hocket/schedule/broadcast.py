"""A broadcast along a binomial tree."""

from __future__ import annotations

from hocket.arrays import Array
from hocket.schedule.operation import NoOp, Operation, Receive, Send
from hocket.schedule.schedule import Schedule

__all__ = ["binomial_broadcast"]


def binomial_broadcast(rank: int, size: int, data: Array, root: int = 0) -> Schedule:
    """Return this rank's part of a broadcast of `root`'s `data`, in ceil(log2 size) stages.

    Args:
        rank: this rank, 0 <= rank < size.
        size: how many ranks.
        data: sent by `root`, received into elsewhere; the same number of bytes on every rank.
        root: whose data it is.

    Returns:
        A schedule with the trigger `start`, which on other ranks than the root holds the receive back until the
        application allows `data` to be overwritten.
    """
    place = (rank - root) % size  # counted from the root, whose place is 0
    operations: list[Operation] = [NoOp("start")]
    have = "start"
    # The lowest bit of a place is the stage at which it receives; the root has data from before the first.
    reach = place & -place if place else 1 << (size - 1).bit_length()
    if place:
        have = "receive"
        operations.append(Receive(have, ("start",), data=data, source=(place - reach + root) % size))
    while reach > 1:
        reach >>= 1
        if place + reach < size:
            to = (place + reach + root) % size
            operations.append(Send(f"send to {to}", (have,), data=data, to=to))
    return Schedule(tuple(operations), (have,), trigger="start")
