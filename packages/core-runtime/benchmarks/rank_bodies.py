"""The ranks' part of `bench_ranks.py`: each way to add up or mix vectors, repeated, and its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np

from hocket.topology import Exponential, Ring, Topology
from hocket.transport.peer import Peer
from hocket.transport.reduction import weighted_sum

_TOPOLOGIES: dict[str, Topology] = {"ring": Ring(), "exponential": Exponential()}


def allreduce(peer: Peer, way: str, nbytes: int, times: int, port: int) -> float:
    """Return the seconds of one allreduce, in the mean of `times` in a row that all ranks start together."""
    return _seconds(peer, _allreduces(peer, nbytes, port)[way], times)


def mix(peer: Peer, way: str, topology: str, nbytes: int, times: int) -> float:
    """Return the seconds of one mixing of vectors."""
    return _seconds(peer, _mixes(peer, topology, nbytes)[way], times)


def there_and_back(peer: Peer, gloo: bool, nbytes: int, times: int, port: int) -> float:
    """Return the seconds of one message, in the mean of `times` there and back between two ranks."""
    send, receive = (_gloo_messages if gloo else _messages)(peer, nbytes, port)

    def call() -> None:
        for act in (send, receive) if peer.rank == 0 else (receive, send):
            act()

    return _seconds(peer, call, times) / 2


def _messages(peer: Peer, nbytes: int, port: int) -> tuple[Callable[[], object], Callable[[], object]]:
    lane, other = _start(peer), 1 - peer.rank
    sent, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return (lambda: lane.isend(sent, other, 0).wait()), (lambda: lane.irecv(received, other, 0).wait())


def _gloo_messages(peer: Peer, nbytes: int, port: int) -> tuple[Callable[[], object], Callable[[], object]]:
    import torch
    import torch.distributed as dist

    _gloo(peer, port)
    data, other = torch.zeros(nbytes, dtype=torch.uint8), 1 - peer.rank
    return (lambda: dist.send(data, other)), (lambda: dist.recv(data, other))


def _seconds(peer: Peer, call: Callable[[], object], times: int) -> float:
    _start(peer).ibarrier().wait()
    start_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start_s) / times


@cache
def _start(peer: Peer):
    return peer.lane("start")


@cache
def _gloo(peer: Peer, port: int):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=peer.rank, world_size=peer.size
    )
    return dist.all_reduce


@cache
def _allreduces(peer: Peer, nbytes: int, port: int) -> dict[str, Callable[[], object]]:
    import torch
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    gloo, tensor = _gloo(peer, port), torch.zeros(nbytes // 4)
    # As a session does it: its segments lie in the transport's memory, each with a lane of its own.
    send, receive = (peer.memory.allocate(nbytes).view(np.float32) for _ in range(2))
    send[:] = receive[:] = 0  # whose sums stay 0, however often they are summed in place
    lane = peer.lane(f"allreduce {nbytes}", nbytes)

    def polled() -> None:
        request = comm.Iallreduce(send, receive)
        while not request.Test():
            pass

    return {
        "gloo": lambda: gloo(tensor),
        "MPI_Allreduce": lambda: comm.Allreduce(send, receive),
        "MPI_Iallreduce": polled,
        "hocket": lambda: lane.iallreduce(send, receive).wait(),
        "hocket in place": lambda: lane.iallreduce(send, send).wait(),
        # What memory takes for as much as an allreduce in place reads and writes.
        "copy": lambda: np.copyto(receive, send),
    }


@cache
def _mixes(peer: Peer, name: str, nbytes: int) -> dict[str, Callable[[], object]]:
    topology = _TOPOLOGIES[name]
    neighbours = topology.neighbours(peer.rank, peer.size, 0, 0)
    rows = topology.mixing_rows(peer.size, 0, 0)
    weights = rows.weights[rows.starts[peer.rank] : rows.starts[peer.rank + 1]].tolist()
    data, out = (peer.memory.allocate(nbytes).view(np.float32) for _ in range(2))
    data[:] = out[:] = 1
    received = [np.ones_like(data) for _ in neighbours.receive_from]
    lane = peer.lane(f"{name} {nbytes}", nbytes)

    def by_messages() -> None:
        sources = zip(received, neighbours.receive_from, strict=True)
        requests = [lane.irecv(buffer, source, 0) for buffer, source in sources]
        requests += [lane.isend(data, to, 0) for to in neighbours.send_to]
        for request in requests:
            request.wait()
        weighted_sum([data, *received], weights, out)

    found: dict[str, Callable[[], object]] = {"messages": by_messages}
    for way, into in (("out of place", out), ("in place", data)):
        mixer = lane.mixer([(data, into)])
        if mixer is not None:
            found[way] = lambda mixer=mixer: mixer.start([rows]).wait()
    return found
