"""The constants of the cost model, measured on the ranks that will use them.

Source: Fang et al., "RedSync", section 2.3, whose constants are those of its machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from itertools import count

import numpy as np
import torch

from hocket.api import Execution, Peer, ProgressEngine, gather, schedule
from hocket_redsync.cost import CostModel
from hocket_redsync.kernels import Memory, Ranking, Update, kernels_for

_REPEATS = 5
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20

# Elements, more than a core's caches hold, and the share of them that is sent.
_NUMEL = 1 << 22
_SENT = _NUMEL // 1000


def calibrate(peer: Peer, progress: ProgressEngine, device: torch.device) -> CostModel:
    """Return the costs of this network and machine, the same on every rank; collective.

    The machine is measured once in a process, the network each time.

    On virtual ranks, seconds of the network are virtual, and those of a core are the wall clock's.

    Args:
        peer: the ranks that will exchange.
        progress: carries out scalable exchanges.
        device: the segments' device.
    """
    gather_latency_s, gather_s_per_byte = _gather(peer)
    reduce_latency_s, reduce_s_per_byte = _reduce(peer)
    own = CostModel(
        gather_latency_s,
        gather_s_per_byte,
        reduce_latency_s,
        reduce_s_per_byte,
        _select(device),
        _add(device),
        _scalable_latency_s(peer, progress),
    )
    of_ranks = gather(peer, asdict(own))
    # All wait for the slowest rank.
    return CostModel(**{name: max(costs[name] for costs in of_ranks) for name in of_ranks[0]})


def _gather(peer: Peer) -> tuple[float, float]:
    """Return a and b of lg(p) a + (p - 1) n b."""
    lane = peer.lane("calibration of gathers")

    def gather(nbytes: int) -> float:
        send, receive = np.zeros(nbytes, np.uint8), np.empty((peer.size, nbytes), np.uint8)
        return _network_seconds(peer, lambda: lane.iallgather(send, receive).wait())

    small_s, large_s = gather(_SMALL_BYTES), gather(_LARGE_BYTES)
    lane.close()
    return _line(peer.size, small_s, large_s, 1.0, peer.size - 1)


def _reduce(peer: Peer) -> tuple[float, float]:
    """Return a' and b' of 2 lg(p) a' + 2 (p - 1) / p n b'."""
    lane = peer.lane("calibration of allreduces", _LARGE_BYTES)

    def reduce(nbytes: int) -> float:
        send, receive = (peer.memory.allocate(nbytes).view(np.float32) for _ in range(2))
        send[:] = 0
        return _network_seconds(peer, lambda: lane.iallreduce(send, receive).wait())

    small_s, large_s = reduce(_SMALL_BYTES), reduce(_LARGE_BYTES)
    lane.close()
    return _line(peer.size, small_s, large_s, 2.0, 2 * (peer.size - 1) / peer.size)


def _scalable_latency_s(peer: Peer, progress: ProgressEngine) -> float:
    """Return a'' of (1 + lg(p)) a'', measured on a schedule with nearly empty messages."""
    if peer.size == 1:
        return 0.0
    send, receive, rows = np.zeros((3, peer.size, 16), np.uint8)
    both_ways = schedule.chain(
        ("to owners", schedule.alltoall(peer.rank, peer.size, send, receive)),
        ("from owners", schedule.allgather(peer.rank, peer.size, rows)),
    )
    run, rounds = Execution(both_ways, peer, progress, "calibration of what is scalable"), count()
    seconds = _network_seconds(peer, lambda: run.start(next(rounds)).wait())
    run.close()
    return seconds / (1 + (peer.size - 1).bit_length())


def _line(size: int, small_s: float, large_s: float, latencies: float, shares: float) -> tuple[float, float]:
    """Return latency and seconds per byte of a line through two measured points."""
    if size == 1:
        return 0.0, 0.0
    s_per_byte = max(0.0, (large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES)) / shares
    latency_s = max(0.0, small_s - shares * _SMALL_BYTES * s_per_byte)
    return latency_s / (latencies * (size - 1).bit_length()), s_per_byte


def _network_seconds(peer: Peer, exchange: Callable[[], object]) -> float:
    lane = peer.lane("calibration starts")
    seconds = []
    for _ in range(_REPEATS + 1):
        lane.ibarrier().wait()
        start_s = peer.clock.now()
        exchange()
        seconds.append(peer.clock.now() - start_s)
    lane.close()
    return sorted(seconds[1:])[_REPEATS // 2]


@cache
def _select(device: torch.device) -> float:
    """Return s, per element: the time of a pass that accumulates, with momentum, and finds a thousandth."""
    kernels = kernels_for(device)
    residual = torch.linspace(-1, 1, _NUMEL, device=device)
    memory = Memory(torch.zeros_like(residual), residual, torch.zeros_like(residual), 0)
    floor = int(Ranking.MAGNITUDE.keys(np.array([0.999], np.float32))[0])
    update = Update(momentum=0.9)

    def select() -> None:
        kernels.is_finite(memory.given)
        kernels.collect([kernels.advance(memory, update, Ranking.MAGNITUDE, floor, 16 * _SENT)])

    return _local_seconds(select) / _NUMEL


@cache
def _add(device: torch.device) -> float:
    """Return g1, per received element."""
    out = torch.zeros(_NUMEL, device=device)
    rng = np.random.Generator(np.random.Philox(key=0))
    indices = torch.from_numpy(rng.permutation(_NUMEL)[:_SENT].astype(np.int32)).to(device)
    values = torch.ones(_SENT, device=device)
    if device.type == "cpu":
        from hocket_redsync.kernels.cpu import add_message

        none, places = values.numpy()[:0], (np.zeros(0, np.int64),) * 3
        pieces = (values.numpy(), none, none), (indices.numpy(), indices.numpy()[:0])
        return _local_seconds(lambda: add_message(out.numpy(), 1.0, places, *pieces)) / _SENT
    return _local_seconds(lambda: float(out.index_add_(0, indices, values)[0])) / _SENT


def _local_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS + 1):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return sorted(seconds[1:])[_REPEATS // 2]
