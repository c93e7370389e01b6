"""Measuring calls at which ranks arrive one after the other, on a peer of either kind.

Source: eager-SGD (Li et al.), sec. 7.1: a linear skew, with ranks synchronised before each iteration.
"""

from __future__ import annotations

import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hocket.api import ThreadProgress, gather
from hocket_eager.collective import PartialAllreduce

if TYPE_CHECKING:
    from hocket.api import Array, Peer

WARM_UP = 8
#: Seconds from the agreed start to the first arrival, and from the last arrival to the next agreement.
SETTLE_S = 0.02

Call = Callable[[int], object]


class Ground(ABC):
    """The clock that all ranks read, their agreement on a start, and the baselines.

    Args:
        peer: this rank's.
    """

    #: The baselines' names.
    baselines: tuple[str, ...]

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    @abstractmethod
    def agree(self) -> float:
        """Return the latest time of any rank; collective."""

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def pause_until(self, then_s: float) -> None: ...

    @abstractmethod
    def baseline(self, name: str, send: Array, receive: Array) -> Call:
        """Return the call of a baseline."""


class RealGround(Ground):
    """The ranks of an MPI job on one host."""

    baselines = ("MPI_Allreduce", "MPI_Iallreduce, polled")

    def agree(self) -> float:
        from mpi4py import MPI

        # A barrier alone lets go of 32 ranks on 2 cores over milliseconds.
        latest: float = MPI.COMM_WORLD.allreduce(self.now(), MPI.MAX)
        return latest

    def now(self) -> float:
        return time.monotonic()

    def pause_until(self, then_s: float) -> None:
        time.sleep(max(then_s - self.now(), 0.0))

    def baseline(self, name: str, send: Array, receive: Array) -> Call:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD

        def blocking(round: int) -> None:
            comm.Allreduce(send, receive)

        def polled(round: int) -> None:
            request = comm.Iallreduce(send, receive)
            while not request.Test():
                os.sched_yield()

        return blocking if name == self.baselines[0] else polled


class PeerGround(Ground):
    """Ranks of any transport with one clock: virtual ones, with a core each, or those of one machine."""

    baselines = ("allreduce",)

    def agree(self) -> float:
        return max(map(float, self.peer.allgather_bytes(repr(self.now()).encode())))

    def now(self) -> float:
        return self.peer.clock.now()

    def pause_until(self, then_s: float) -> None:
        self.peer.clock.sleep(max(then_s - self.now(), 0.0))

    def baseline(self, name: str, send: Array, receive: Array) -> Call:
        lane = self.peer.lane(name)
        return lambda round: lane.iallreduce(send, receive).wait()


def measure(
    ground: Ground, sides: dict[str, PartialAllreduce], side: str, nbytes: int, iterations: int
) -> dict[str, float]:
    """Return a side's mean latency over ranks, that of the first to arrive, and the mean number of active ranks.

    Rank i arrives i + 1 ms after a start that all read from one clock; its latency is the time until it has a result.

    Args:
        sides: partial allreduces by name; other names are the ground's baselines.
    """
    peer = ground.peer
    send, receive = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    if side in ground.baselines:
        latencies = _skewed(ground, ground.baseline(side, send, receive), iterations)
        active = [peer.size] * iterations
    else:
        progress = ThreadProgress()
        sums, close = sides[side].open_sums(peer, progress, side, [(side, 0, send)])
        active_in: list[int] = []

        def partial(round: int) -> None:
            sums[0].propose(send, round)
            sums[0].wait(round)
            active_in.append(sums[0].fetch(round, receive).num_active)

        latencies = _skewed(ground, partial, iterations)
        active = active_in[WARM_UP:]
        sums[0].close()
        close()
        progress.close()
    everyone = gather(peer, [float(np.mean(latencies)), float(np.mean(active))])
    means = [mean for mean, _ in everyone]
    return {"mean_s": float(np.mean(means)), "first_s": means[0], "active": everyone[0][1]}


def idle_cores(peer: Peer, sides: dict[str, PartialAllreduce]) -> float:
    """Return the CPU seconds a second of all ranks with one partial allreduce of each kind open and idle."""
    progress = ThreadProgress()
    like = np.ones(16, np.float32)
    opened = [side.open_sums(peer, progress, name, [(name, 0, like)]) for name, side in sides.items()]
    time.sleep(1.0)
    before_s, begin_s = _cpu_s(), time.monotonic()
    time.sleep(1.0)
    own = (_cpu_s() - before_s) / (time.monotonic() - begin_s)
    for sums, close in opened:
        sums[0].close()
        close()
    progress.close()
    return float(sum(gather(peer, own)))


def _skewed(ground: Ground, call: Call, iterations: int) -> list[float]:
    """Return the seconds that this rank's calls take."""
    seconds = []
    for round in range(WARM_UP + iterations):
        start_s = ground.agree() + SETTLE_S
        ground.pause_until(start_s + 1e-3 * (ground.peer.rank + 1))
        arrived_s = ground.now()
        call(round)
        seconds.append(ground.now() - arrived_s)
        # In MPI's own wait, ranks that end early would burn the cores of those that compute.
        ground.pause_until(start_s + 1e-3 * ground.peer.size + SETTLE_S)
    return seconds[WARM_UP:]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
