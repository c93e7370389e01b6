"""A partial allreduce that the first rank to arrive starts, against MPI_Iallreduce, and what it costs when idle.

    python packages/core-runtime/benchmarks/partial_allreduce.py [RANKS]

Ranks arrive 1, 2, ... RANKS milliseconds after a common start, in each of 64 iterations; 64 bytes. Latency is the time
from a rank's arrival until it has a result, the mean over ranks and iterations. `cores` is the CPU time of all ranks in
a second that begins after 1 s without anything to do. The allreduce is the paper's recursive doubling, and a star,
which wakes each rank twice: with 16 ranks to a core, waking them is what takes the time.

Source of the set-up: eager-SGD (Li et al.), sec. 7.1, Fig. 8 (there 53 times below MPI_Allreduce, on 32 nodes).
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from measuring import run_ranks

from hocket.progress import ThreadProgress
from hocket.schedule import recursive_doubling_allreduce, tree_allreduce
from hocket.transport import mpi
from hocket.transport.mpi import MPIPeer
from hocket.transport.peer import gather

# The partial allreduce is the tests' own; the eager plugin has the one for users.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "progress"))
from solo import Solo

ITERATIONS = 64
WARM_UP = 8
COUNT = 16  # float32
SETTLE_S = 0.02


def rank() -> None:
    """Measure, as one of the ranks."""
    from mpi4py import MPI

    peer = mpi.join()
    comm = MPI.COMM_WORLD.Dup()
    if peer.rank == 0:
        library = MPI.Get_library_version().split(",")[0]
        print(f"{peer.size} ranks on {len(os.sched_getaffinity(0))} cores, {library}, {4 * COUNT} bytes")
    send, receive = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)

    def polled(round: int) -> None:
        request = comm.Iallreduce(send, receive)
        while not request.Test():
            os.sched_yield()

    full_s = latency(peer, polled)
    progress = ThreadProgress()
    solo_s = {}
    for name, allreduce in (
        ("recursive doubling", recursive_doubling_allreduce),
        ("star", partial(tree_allreduce, arity=peer.size)),
    ):
        solo = Solo(peer, progress, COUNT, "float32", allreduce=allreduce, remembers=False, name=name)
        solo_s[name] = latency(peer, lambda round, solo=solo: solo(send, round))
    cores = idle_cores(peer)
    progress.close()
    if peer.rank == 0:
        print(f"{'MPI_Iallreduce, polled':<28} {1e3 * full_s:8.3f} ms")
        for name, seconds in solo_s.items():
            print(f"{f'solo, {name}':<28} {1e3 * seconds:8.3f} ms, {full_s / seconds:.1f} times lower")
        print(f"{'idle, two solos open':<28} {cores:8.3f} cores, all ranks together")
    peer.close()


def latency(peer: MPIPeer, call: Callable[[int], object]) -> float:
    """Return the mean seconds over ranks and iterations that `call(round)` takes after a skewed start."""
    from mpi4py import MPI

    waits = []
    for round in range(WARM_UP + ITERATIONS):
        # A start that all read from one clock: a barrier alone lets go of 32 ranks on 2 cores over milliseconds.
        start_s = MPI.COMM_WORLD.allreduce(time.monotonic(), MPI.MAX) + SETTLE_S
        _sleep_until(start_s + 1e-3 * (peer.rank + 1))
        arrived_s = time.monotonic()
        call(round)
        waits.append(time.monotonic() - arrived_s)
    return mean_over_ranks(peer, sum(waits[WARM_UP:]) / ITERATIONS)


def idle_cores(peer: MPIPeer) -> float:
    """Return the CPU seconds per second of all ranks while nothing happens, from 1 s after it began."""
    from mpi4py import MPI

    MPI.COMM_WORLD.allreduce(0)
    time.sleep(1.0)
    before_s, begin_s = _cpu_s(), time.monotonic()
    time.sleep(1.0)
    return mean_over_ranks(peer, (_cpu_s() - before_s) / (time.monotonic() - begin_s)) * peer.size


def mean_over_ranks(peer: MPIPeer, value: float) -> float:
    """Return the mean of every rank's `value`."""
    return float(np.mean(gather(peer, value)))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(moment_s - time.monotonic(), 0.0))


if __name__ == "__main__":
    run_ranks(__file__, rank, default_ranks=32)
