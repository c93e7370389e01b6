"""A rank that forks a process, which ends as it is told, while the ranks go on; rank 0 prints its status."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

from hocket.errors import TransportError
from hocket.launch.joining import join
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer


def fork(lane: Lane, how: str) -> None:
    """What the forked process does."""
    if how == "raise":
        raise ValueError("in the child")
    if how == "exit":
        sys.exit(3)
    if how == "exchange":
        try:
            lane.ibarrier().wait()
        except TransportError as error:
            print(f"refused: {error}", file=sys.stderr, flush=True)


def main(how: str) -> None:
    peer: Peer = join()
    lane = peer.lane("a")
    stopping = threading.Event()
    peer.threads.spawn("test", stopping.wait, stopping.set)
    received = np.zeros(8)
    under_way = lane.irecv(received, 1 - peer.rank, 7)
    if peer.rank == 0:
        child = os.fork()
        if child == 0:
            fork(lane, how)
            return
        print(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
    sent = lane.isend(np.full(8, 5.0), 1 - peer.rank, 7)
    under_way.wait()
    sent.wait()
    assert (received == 5).all()


if __name__ == "__main__":
    main(sys.argv[1])
