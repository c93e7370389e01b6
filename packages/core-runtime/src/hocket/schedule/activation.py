"""How one rank calls all others to a collective.

Source: eager-SGD (Li et al.), sec. 4.1.1: "a modified version of the recursive doubling communication scheme ...
equivalent to the union of P binomial trees". There partners are r xor 2^s, which exist for powers of two only; here
the partner of stage s is r + 2^s modulo P, which makes the same trees for any P.
"""

from __future__ import annotations

from hocket.schedule.operation import Logic, NoOp, Operation, Receive, Send
from hocket.schedule.schedule import Schedule

__all__ = ["activation_broadcast"]


def activation_broadcast(rank: int, size: int) -> Schedule:
    """Return this rank's part of the activation: it ends as soon as the rank is activated, by whomever.

    Every rank can be the initiator, and several can at once: who receives at stage s forwards at the stages after s,
    whoever is activated twice forwards once. The initiator sends ceil(log2 size) notices and everybody hears within as
    many stages; with one initiator 2^ceil(log2 size) - 1 notices are sent, which is one per rank for powers of two.

    Args:
        rank: this rank, 0 <= rank < size.
        size: how many ranks.

    Returns:
        A schedule with the trigger `arrive` that ends with `active`.
    """
    num_stages = (size - 1).bit_length()
    operations: list[Operation] = [NoOp("arrive")]
    callers = ["arrive"]
    for stage in range(num_stages):
        to, source = (rank + (1 << stage)) % size, (rank - (1 << stage)) % size
        operations.append(Send(f"call {stage}", tuple(callers), Logic.ANY, to=to, tag=stage))
        operations.append(Receive(f"called {stage}", source=source, tag=stage))
        callers.append(f"called {stage}")
    operations.append(NoOp("active", tuple(callers), Logic.ANY))
    return Schedule(tuple(operations), ("active",), trigger="arrive", num_tags=max(num_stages, 1))
