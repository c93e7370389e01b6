"""One rank of the tests of the host path: `python host_cases.py`, under mpiexec. Prints a line of JSON per rank."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np

from hocket.transport import mpi
from hocket.transport.host.allreduce import HostAllreduce
from hocket.transport.peer import Peer
from hocket.transport.reduction import tree_sum

BIG = 600_000  # elements: enough for the host path to be taken


def contribution(rank: int, round: int, numel: int, dtype: str) -> np.ndarray:
    return (np.random.default_rng([rank, round]).standard_normal(numel) * 100).astype(dtype)


def buffers(peer: Peer, numel: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    nbytes = numel * np.dtype(dtype).itemsize
    return peer.allocate(nbytes).view(dtype), peer.allocate(nbytes).view(dtype)


def sums(peer: Peer) -> bool:
    """Sizes that do not divide by the ranks, all dtypes, several rounds, against the same tree in one process."""
    for numel in (BIG, BIG + 1, 1_234_567):
        for dtype in ("float32", "float64", "int32", "int64"):
            send, receive = buffers(peer, numel, dtype)
            lane = peer.lane("sums", send.nbytes)
            for round in range(3):
                send[:] = contribution(peer.rank, round, numel, dtype)
                lane.iallreduce(send, receive).wait(20)
                expected = tree_sum([contribution(rank, round, numel, dtype) for rank in range(peer.size)])
                np.testing.assert_array_equal(receive, expected)
                # The result is this rank's own: others still read their shares of it while it is overwritten here.
                receive[:] = -1
            lane.close()
    return True


def orders(peer: Peer) -> bool:
    """Lanes started and waited for in another order on every rank, some requests dropped."""
    lanes = [(peer.lane(f"orders {i}", 4 * BIG), *buffers(peer, BIG, "float32")) for i in range(6)]
    draws = random.Random(peer.rank)
    for round in range(8):
        for number, (_, send, receive) in enumerate(lanes):
            send[:] = contribution(peer.rank, 100 * round + number, BIG, "float32")
            receive[:] = 0
        requests = []
        for number in draws.sample(range(6), 6):
            lane, send, receive = lanes[number]
            requests.append((number, lane.iallreduce(send, receive)))
        draws.shuffle(requests)
        for _, request in requests[1:]:
            request.wait(20)
        del requests
        peer.lane("everybody").ibarrier().wait(20)  # the dropped ones are carried out by whoever waits
        for number, (lane, send, receive) in enumerate(lanes):
            lane.iallreduce(send, receive).wait(20)
            parts = [contribution(rank, 100 * round + number, BIG, "float32") for rank in range(peer.size)]
            np.testing.assert_array_equal(receive, tree_sum(parts))
    return True


def groups(peer: Peer) -> bool:
    """A group's allreduce over memory that the world allocated."""
    mine = [rank for rank in range(peer.size) if rank % 2 == peer.rank % 2]
    group = peer.group(mine)
    assert group is not None
    send, receive = buffers(peer, BIG, "float32")
    send[:] = contribution(peer.rank, 0, BIG, "float32")
    lane = group.lane("groups", send.nbytes)
    lane.iallreduce(send, receive).wait(20)
    np.testing.assert_array_equal(receive, tree_sum([contribution(r, 0, BIG, "float32") for r in mine]))
    return True


def falls_back(peer: Peer) -> str:
    """One rank cannot have the memory: all use messages, and know why."""
    from hocket.transport.host import memory

    group = peer.group(list(range(peer.size)))
    assert isinstance(group, mpi.MPIPeer)
    reserve = memory._reserve
    if peer.rank == peer.size - 1:
        memory._reserve = lambda path, nbytes: "/dev/shm: No space left on device"
    send, receive = buffers(group, BIG, "float32")
    memory._reserve = reserve
    lane = group.lane("falls back", send.nbytes)
    send[:] = peer.rank
    lane.iallreduce(send, receive).wait(20)
    assert (receive == sum(range(peer.size))).all()
    return group.memory.refused


def main() -> None:
    peer = mpi.join()
    taken = []
    begin = HostAllreduce.__init__
    HostAllreduce.__init__ = lambda self, *args: (taken.append(1), begin(self, *args))[1]  # type: ignore[method-assign]
    results = {case.__name__: case(peer) for case in (sums, orders, groups, falls_back)}
    results["over shared memory"] = len(taken)
    send, receive = buffers(peer, BIG, "float32")
    send[:] = contribution(peer.rank, 7, BIG, "float32")
    peer.lane("bits", send.nbytes).iallreduce(send, receive).wait(20)
    results["bits"] = hashlib.sha256(receive.tobytes()).hexdigest()
    told = peer.allgather_bytes(json.dumps(results).encode())
    if peer.rank == 0:
        print("\nRESULTS " + json.dumps([json.loads(data) for data in told]), flush=True)
    peer.close()


if __name__ == "__main__":
    main()
