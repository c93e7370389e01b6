"""Messages there and back between two ranks, by transport and by Gloo: 8 bytes, 64 KiB, 1 MiB.

A time is that of one way, as rank 0 measures it, in the mean of many in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_bodies
from bench_ranks import CLOCK
from measuring import free_port

from hocket.testing.job import Job

WAYS = {"torch": "torch", "mpi": "mpi", "gloo": "torch"}
MESSAGES = {8: 500, 64 << 10: 200, 1 << 20: 30}

pytestmark = [pytest.mark.benchmark(timer=CLOCK), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def jobs() -> Iterator[tuple[dict[str, Job], int]]:
    """A job for each transport, and a port for Gloo."""
    found = {transport: Job(2, Path(__file__).parent, transport) for transport in set(WAYS.values())}
    yield found, free_port()
    for job in found.values():
        job.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nbytes", MESSAGES)
def bench_messages(benchmark: Any, jobs: tuple[dict[str, Job], int], nbytes: int, way: str) -> None:
    benchmark.group = f"messages of {nbytes} bytes, there and back"
    by_transport, port = jobs

    def call() -> None:
        args = (way == "gloo", nbytes, MESSAGES[nbytes], port)
        CLOCK.seconds += by_transport[WAYS[way]].run(rank_bodies.there_and_back, args)[0]

    benchmark.pedantic(call, rounds=7, warmup_rounds=1)
