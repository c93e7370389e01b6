"""Nothing grows with the steps of a run: objects, memory, open files and threads stay as many as they were."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from matrix import recipes, shorter_periods
from trial import Toy, batches, loss_of, optimizer_for

import hocket
from hocket.strategy import Strategy
from hocket.testing.job import Job
from hocket.transport.peer import Peer

HERE = Path(__file__).parent

#: Enough for caches, queues and Python's own free lists to have filled.
_WARM = 100


class Held(NamedTuple):
    """The resources of a process."""

    blocks: int
    objects: int
    files: int
    threads: int
    resident_kb: int


def held() -> Held:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return Held(
        sys.getallocatedblocks(),
        len(gc.get_objects()),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        int(status.split("VmRSS:")[1].split()[0]),
    )


def soak(strategy: Strategy, steps: int, peer: Peer | None = None) -> list[Held]:
    """Train on this rank; return what its process held after a while, and at the end."""
    peer = peer or hocket.join()
    rank = peer.rank
    model, data = Toy(rank), batches(rank, 8)
    optimizer = optimizer_for(model)
    told = []
    with hocket.attach(model, optimizer, strategy, peer=peer) as session:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(model, data[step % len(data)]).backward()
            optimizer.step()
            if step in (max(_WARM, steps // 4), steps):
                session.settle()
                told.append(held())
    return told


def check(before: Held, after: Held, steps: int) -> None:
    """Compare with what a step would leave: a request that is kept is several objects and some 15 blocks."""
    grown = Held(*(b - a for a, b in zip(before, after, strict=True)))
    assert grown.objects < 300 + steps / 10, grown
    assert grown.blocks < 3000 + steps / 10, grown
    assert grown.files <= 0, grown
    assert grown.threads <= 0, grown
    assert grown.resident_kb < 20_000, grown


def soaked(recipe: str) -> Strategy:
    return hocket.compose(recipe, *shorter_periods(recipe, 24))


def soak_recipe(peer: Peer, recipe: str, steps: int) -> list[list[int]]:
    """Train on a rank that is a process."""
    return [list(each) for each in soak(soaked(recipe), steps, peer)]


@pytest.mark.parametrize("recipe", ["sgp", "agd", "diloco"])  # `test_20000_steps` has all
def test_300_steps(recipe: str) -> None:
    for before, after in hocket.virtual(2).run(soak, soaked(recipe), 300):
        check(before, after, 200)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", recipes())
def test_20000_steps(recipe: str) -> None:
    for before, after in hocket.virtual(2).run(soak, soaked(recipe), 20_000):
        check(before, after, 15_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", recipes())
def test_5000_steps_over_torch(recipe: str) -> None:
    with closing(Job(2, HERE, "torch")) as job:
        for before, after in job.run(soak_recipe, (recipe, 5_000)):
            check(Held(*before), Held(*after), 3_750)
