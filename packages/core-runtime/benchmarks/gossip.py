"""Gossip over shared memory against messages, in one job: the ring and the one-peer exponential graph.

    python packages/core-runtime/benchmarks/gossip.py [RANKS]

Milliseconds, the slowest rank, median; float32. `messages` are what a rank does without a better way: it sends its
vector to each neighbour, and adds up what it receives. `in place` is the same mixing where the result replaces the
vector, `out of place` where it does not. `ratio` is messages over in place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from measuring import medians, run_ranks

from hocket.topology import Exponential, Ring, Topology
from hocket.transport.peer import Peer
from hocket.transport.reduction import weighted_sum

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100_000_000]


def sides(peer: Peer, topology: Topology, nbytes: int) -> list[tuple[str, Callable[[], object]]]:
    """Return the ways to mix vectors of so many bytes that this transport has."""
    neighbours = topology.neighbours(peer.rank, peer.size, 0, 0)
    rows = topology.mixing_rows(peer.size, 0, 0)
    weights = rows.weights[rows.starts[peer.rank] : rows.starts[peer.rank + 1]].tolist()
    data, out = (peer.memory.allocate(nbytes).view(np.float32) for _ in range(2))
    data[:] = out[:] = 1
    received = [np.ones_like(data) for _ in neighbours.receive_from]
    lane = peer.lane("gossip", nbytes)

    def by_messages() -> None:
        requests = [
            lane.irecv(buffer, source, 0)
            for buffer, source in zip(received, neighbours.receive_from, strict=True)
        ]
        requests += [lane.isend(data, to, 0) for to in neighbours.send_to]
        for request in requests:
            request.wait()
        weighted_sum([data, *received], weights, out)

    found: list[tuple[str, Callable[[], object]]] = [("messages", by_messages)]
    for name, into in (("out of place", out), ("in place", data)):
        mixer = lane.mixer([(data, into)])
        if mixer is not None:
            found.append((name, lambda mixer=mixer: mixer.start([rows]).wait()))
    return found


def rank() -> None:
    """Measure, as one of the ranks."""
    from hocket.transport import mpi

    peer = mpi.join()
    if peer.rank == 0:
        print(f"{peer.size} ranks")
        print(
            f"{'topology':>12} {'bytes':>11} {'messages':>9} {'out of place':>12} {'in place':>9} {'ratio':>6}"
        )
    topologies: list[Topology] = [Ring(), Exponential()]
    for topology in topologies:
        for nbytes in SIZES:
            seconds = medians(peer, sides(peer, topology, nbytes), 51 if nbytes < 8 << 20 else 11)
            if peer.rank == 0:
                ms = {name: 1e3 * s for name, s in seconds.items()}
                line = f"{type(topology).__name__:>12} {nbytes:>11} {ms['messages']:>9.3f}"
                if "in place" in ms:
                    ratio = ms["messages"] / ms["in place"]
                    line += f" {ms['out of place']:>12.3f} {ms['in place']:>9.3f} {ratio:>6.2f}"
                print(line, flush=True)
    peer.close()


if __name__ == "__main__":
    run_ranks(__file__, rank)
