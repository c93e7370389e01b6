"""Fault injection: a transport around another that delays, reorders and drops messages, or kills its rank.

    world = hocket.virtual(4, wrap=Faults(seed=7, delay_s=(0, 0.01), kill=KillAt(rank=2, step=3)).wrap)
    session = hocket.attach(model, optimizer, strategy, peer=Faults(delay_s=(0, 0.01)).wrap(join()))

A message's faults are drawn from its address (lane, source, destination, round), never from the order of calls: on
virtual ranks the same seed gives the same history. No thread sleeps. On virtual ranks a delay is virtual time; in a
process an operation is held back until the clock has passed and the thread that began it looks at one of its requests
again.
"""

from hocket.transport.faults.config import KillAt
from hocket.transport.faults.peer import Faults

__all__ = ["Faults", "KillAt"]
