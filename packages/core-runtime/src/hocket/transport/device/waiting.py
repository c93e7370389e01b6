"""Waits for torch, in which a rank notices others' deaths and answers their requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hocket.errors import TransportError
from hocket.transport.host.peer import HostPeer
from hocket.transport.request import Request
from hocket.transport.status import WaitSite
from hocket.transport.threads import ThreadRequest
from hocket.transport.waiting import wait

# So soon after a connection has been closed, in seconds, the host's peer knows whether a rank has died.
_KNOWN_WITHIN_S = 1.0


def start_aside(held: HostPeer, call: Callable[[], Any]) -> Request:
    """Begin a call into torch in a thread, as it notices neither Ctrl-C nor others' deaths while it waits."""
    return ThreadRequest(held, "torch", call, None)


def wait_for_torch(
    held: HostPeer,
    done: Callable[[], bool],
    timeout_s: float,
    lane: str,
    what: str,
    others: Sequence[int],
) -> None:
    """Wait for torch, and answer other ranks' requests meanwhile.

    Args:
        held: the ranks.
        done: returns whether it is over.
        timeout_s: seconds to wait at most.
        lane, what: the lane, and the operation.
        others: the ranks that it needs.

    Raises:
        ExchangeTimeoutError: it is not over in time; names this rank and those it needs.
        PeerLostError: a rank has died.
    """

    def look() -> bool:
        held.progress.advance()
        return done()

    def describe(outcome: str) -> str:
        ranks = [held.world_ranks[rank] for rank in others]
        site = WaitSite(lane, what, ranks, together=len(ranks) == held.size - 1)
        return held.status.describe_stall(site, outcome)

    def check() -> None:
        held.status.check(lambda: f"rank {held.world_rank}: {lane} ({what})")

    if done():
        return
    held.status.note_waiting(what, lane)
    wait(look, timeout_s, describe, check=check)
    held.status.note_computing()


def explain(held: HostPeer, where: str, failed: str, error: RuntimeError, advice: str) -> TransportError:
    """Return the error to raise for one of torch's, which names connections and not the dead rank."""
    end_s = time.monotonic() + _KNOWN_WITHIN_S
    while not (dead := held.status.failures.dead()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return (
        held.status.failures.lost(where, dead)
        if dead
        else TransportError(f"{failed} ({first_line(error)}). {advice}")
    )


def first_line(error: RuntimeError) -> str:
    """Return torch's message, without its place in torch's source."""
    line = (str(error).splitlines() or [""])[0].rstrip(". ")
    return line.partition("] ")[2] if line.startswith("[") else line
