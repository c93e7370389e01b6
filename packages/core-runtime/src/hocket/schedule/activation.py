"""How one rank calls all others to a collective.

Source: eager-SGD (Li et al.), sec. 4.1.1: "a modified version of the recursive doubling communication scheme ...
equivalent to the union of P binomial trees". There partners are r xor 2^s, which exist for powers of two only; here
the partner of stage s is r + 2^s modulo P, which makes the same trees for any P.
"""

from __future__ import annotations

from hocket.schedule.operation import Logic, NoOp, Operation, Receive, Send
from hocket.schedule.schedule import Schedule

__all__ = ["activation_broadcast"]


def activation_broadcast(rank: int, size: int, radix: int = 2) -> Schedule:
    """Return this rank's part of the activation: it ends as soon as the rank is activated, by whomever.

    Every rank can be the initiator, and several can at once: who is called at stage s calls others at the stages after
    s, whoever is called twice does so once. Everybody hears within ceil(log_radix size) stages. One initiator makes for
    radix^stages - 1 notices at most, which is one per rank if size is a power of the radix, or not above it.

    Args:
        rank: this rank, 0 <= rank < size.
        size: how many ranks.
        radix: the partners of stage s are r + j radix^s modulo P, 0 < j < radix. 2 is the paper's, and the fastest
            where every rank has a core; `size` lets the initiator call all, so that nobody wakes to call others.

    Returns:
        A schedule with the trigger `arrive` that ends with `active`.
    """
    distances = [reach * j for reach in _powers(radix, size) for j in range(1, radix) if reach * j < size]
    operations: list[Operation] = [NoOp("arrive")]
    callers = ["arrive"]
    called: list[str] = []
    reach = 1
    for tag, distance in enumerate(distances):
        if distance >= reach * radix:
            reach *= radix
            callers, called = callers + called, []
        to, source = (rank + distance) % size, (rank - distance) % size
        operations.append(Send(f"call {distance}", tuple(callers), Logic.ANY, to=to, tag=tag))
        operations.append(Receive(f"called {distance}", source=source, tag=tag))
        called.append(f"called {distance}")
    operations.append(NoOp("active", (*callers, *called), Logic.ANY))
    return Schedule(tuple(operations), ("active",), trigger="arrive", num_tags=max(len(distances), 1))


def _powers(radix: int, limit: int) -> list[int]:
    powers = [1]
    while powers[-1] * radix < limit:
        powers.append(powers[-1] * radix)
    return powers
