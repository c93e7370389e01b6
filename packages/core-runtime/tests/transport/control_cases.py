"""Bodies in which ranks do different things."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hocket.errors import PeerLostError, TransportError
from hocket.transport.peer import Peer, gather


def leave_early(peer: Peer) -> str:
    """Rank 1 is at the end, where the others still open a lane."""
    group = peer.group(list(range(peer.size)))
    assert group is not None
    try:
        if group.rank == 1:
            group.close()
        else:
            group.lane("gradients.0[3]")
    except TransportError as error:
        return str(error)
    return "nothing"


def catch_an_interruption(peer: Peer) -> str:
    """Rank 1 is interrupted in a call before it sends its data, and makes the next call."""
    group: Any = peer.group(list(range(peer.size)))
    if group.rank == 1:
        begin = group._gather_words

        def interrupt(*args: Any) -> None:
            begin(*args)
            del group._gather_words
            raise KeyboardInterrupt

        group._gather_words = interrupt
    try:
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                gather(group, [5, "session.consensus"], what="the loop over session.data")
    except TransportError as error:
        return str(error)
    return "nothing"


def form_groups_often(peer: Peer) -> list[bool]:
    """Groups that were formed before take no new communicator, whoever has known which; they work as new ones do."""
    counts = []
    for pair in [(0, 1), (0, 1), (1, 2), (0, 1), (1, 2)]:
        rest = tuple(rank for rank in range(peer.size) if rank not in pair)
        mine = pair if peer.rank in pair else rest
        group = peer.group(mine)
        assert group is not None
        assert gather(group, peer.rank) == list(mine)
        counts.append(_next_communicator())
    return [later == counts[2] for later in counts[3:]] + [counts[0] == counts[1]]


def open_many_lanes(peer: Peer) -> list[str]:
    lanes, told = [], ""
    try:
        for number in range(2100):
            lanes.append(peer.lane(f"gradients.0[{number}]"))
    except TransportError as error:
        told = str(error)
    for lane in lanes:
        lane.close()
    return [told, str(len(lanes))]


def _next_communicator() -> int:
    """Return a number that grows with the communicators in use."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    number: int = comm.py2f()
    comm.Free()
    return number


def call_something_else(peer: Peer) -> str:
    """Rank 0 is at a barrier where the others add up."""
    lane, data = peer.lane("mixed up"), np.ones(3)
    request = lane.iallreduce(data, data) if peer.rank else lane.ibarrier()
    try:
        request.wait(10)
    except TransportError as error:
        return str(error)
    return "nothing"


def wait_idly(peer: Peer, numel: int) -> float:
    """Return the seconds of CPU that a rank uses while it waits 2 s for rank 0."""
    lane, data = peer.lane("late", 8 * numel), np.ones(numel)
    lane.ibarrier().wait()
    start_s = time.process_time()
    if peer.rank == 0:
        time.sleep(2)
    lane.iallreduce(data, np.empty_like(data)).wait()
    return time.process_time() - start_s


def lose_a_rank_that_has_forked(peer: Peer, file: str) -> None:
    """Rank 1 is killed, and a process that it has forked lives on; rank 0 leaves there what it is told, and when."""
    if peer.rank == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    try:
        peer.lane("lost").ibarrier().wait(15)
    except PeerLostError as error:
        Path(file).write_text(f"{time.monotonic() - start_s} {error}")


def drop_and_wait(peer: Peer) -> bool:
    """Return whether anything is left of messages that were dropped, once all have come."""
    lane = peer.lane("dropped")
    other = 1 - peer.rank
    received = [np.zeros(1000) for _ in range(10)]
    requests = [lane.irecv(data, other, round) for round, data in enumerate(received)]
    for round in range(10):
        lane.isend(np.full(1000, float(round)), other, round)
    for request in requests:
        request.wait(20)
    assert all((data == round).all() for round, data in enumerate(received))
    group = peer.group([0, 1])
    assert group is not None
    assert group.progress is peer.progress
    for _ in range(20):
        lane.ibarrier().wait(20)
        peer.progress.advance()
    return peer.progress.busy
