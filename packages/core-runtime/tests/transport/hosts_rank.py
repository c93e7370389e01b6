"""A rank of the torch transport on one of two hosts: `hosts_rank.py RANK SIZE HOST PORT`; the last one is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np

from hocket.errors import ExchangeTimeoutError, PeerLostError
from hocket.testing.transport import collectives, gathering, messages, peers
from hocket.transport.meeting import Rendezvous
from hocket.transport.tcp import TcpPeer, join


def wait_for_the_last(peer: TcpPeer) -> str:
    """Return what is said of the last rank, which computes for 4 s where the others wait."""
    lane = peer.lane("gradients.0[0]")
    peer.status.note_step(7)
    if peer.rank == peer.size - 1:
        time.sleep(4)
        lane.ibarrier().wait()
        return ""
    barrier = lane.ibarrier()
    try:
        barrier.wait(3)
    except ExchangeTimeoutError as error:
        barrier.wait()
        return str(error)
    return "nothing"


def lose_the_last(peer: TcpPeer) -> str:
    """Return what is said when the last rank is killed."""
    total = np.zeros(10)
    if peer.rank == peer.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        peer.lane("gradients.0[1]").iallreduce(total, total).wait(20)
    except PeerLostError as error:
        return str(error)
    return "nothing"


def main(rank: int, size: int, host: str, port: int) -> None:
    peer = join(Rendezvous(rank, size, host, port, "job", serves=rank == 0, timeout_s=30))
    peer.timeout_s = 20
    group = peer.group([0, 1] if rank < 2 else [2, 3])
    assert group is not None
    shared = [each.memory.share(100) is not None for each in (peer, group)]
    messages.exchange_at_random(peer, 11, 40)
    gathering.mix_at_random(peer, 1, 30)
    collectives.allreduce_against_numpy(peer, "float32", [0, 1, 1000, 300_003])
    peers.split_by_parity(peer)
    stalled = wait_for_the_last(peer)
    start_s = time.monotonic()
    lost = lose_the_last(peer)
    print(json.dumps([shared, stalled, lost, time.monotonic() - start_s]), flush=True)
    os._exit(0)  # the job is broken, on purpose


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
