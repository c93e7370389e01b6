"""Allreduce and gossip among ranks over MPI: Hocket's against Gloo's, MPI's and plain messages, float32.

A round's time is the slowest rank's, as the ranks measure it; that of the call to the ranks is not in it. HOCKET_RANKS
says how many ranks there are, by default 4.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_bodies
from measuring import free_port

from hocket.testing.job import Job

RANKS = int(os.environ.get("HOCKET_RANKS", "4"))
ALLREDUCED = [64 << 10, 1 << 20, 16 << 20, 100_000_000]
MIXED = [256 << 10, 4 << 20, 100_000_000]


class _RanksClock:
    """A clock that goes on by what the ranks have measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = _RanksClock()
pytestmark = [pytest.mark.benchmark(timer=CLOCK), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[Job, int]]:
    """A job, and a port for Gloo."""
    job = Job(RANKS, Path(__file__).parent)
    yield job, free_port()
    job.close()


def measure(benchmark: Any, job: Job, body: Callable[..., Any], nbytes: int, *args: Any) -> None:
    large = nbytes > 1 << 22

    def call() -> None:
        CLOCK.seconds += max(job.run(body, args))

    benchmark.pedantic(call, rounds=11 if large else 51, warmup_rounds=1)


@pytest.mark.parametrize(
    "way", ["gloo", "MPI_Allreduce", "MPI_Iallreduce", "hocket", "hocket in place", "copy"]
)
@pytest.mark.parametrize("nbytes", ALLREDUCED)
def bench_allreduce(benchmark: Any, ranks: tuple[Job, int], nbytes: int, way: str) -> None:
    job, port = ranks
    benchmark.group = f"allreduce of {nbytes} bytes, {RANKS} ranks"
    measure(benchmark, job, rank_bodies.allreduce, nbytes, way, nbytes, 3, port)


@pytest.mark.parametrize("way", ["messages", "out of place", "in place"])
@pytest.mark.parametrize("nbytes", MIXED)
@pytest.mark.parametrize("topology", ["ring", "exponential"])
def bench_mixing(benchmark: Any, ranks: tuple[Job, int], topology: str, nbytes: int, way: str) -> None:
    benchmark.group = f"{topology} of {nbytes} bytes, {RANKS} ranks"
    if way != "messages" and nbytes < 1 << 20:
        pytest.skip("below 1 MiB ranks mix by messages")
    measure(benchmark, ranks[0], rank_bodies.mix, nbytes, way, topology, nbytes, 3)
