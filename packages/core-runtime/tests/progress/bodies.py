"""What ranks do in these tests, virtual ones and processes alike; checked by each rank itself or by `check_solo`."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
from solo import Solo

from hocket.arrays import Array
from hocket.progress import InlineProgress, ProgressEngine, ThreadProgress
from hocket.schedule import (
    Compute,
    NoOp,
    Schedule,
    binomial_broadcast,
    recursive_doubling_allreduce,
    ring_allreduce,
    tree_allreduce,
)
from hocket.transport.host import doorbell
from hocket.transport.peer import Peer

ENGINES: dict[str, Callable[[], ProgressEngine]] = {"thread": ThreadProgress, "inline": InlineProgress}
ALLREDUCES: dict[str, Callable[[int, int, Array], Schedule]] = {
    "recursive doubling": recursive_doubling_allreduce,
    "ring": ring_allreduce,
    "tree": tree_allreduce,
    "star": partial(tree_allreduce, arity=64),
}


@dataclass
class Told:
    """What a rank says of its partial allreduces.

    Attributes:
        computed: the sum of all it wanted to contribute.
        taken: what each round took.
        results: each round's sum.
        waiting: what no round took.
    """

    computed: list[float]
    taken: list[list[float]]
    results: list[list[float]]
    waiting: list[float]


def solo_rounds(peer: Peer, seed: int, rounds: int, count: int, allreduce: str, slow: float) -> Told:
    """Compute for random times and contribute, round after round; one rank in three is `slow` times as slow."""
    draw = random.Random(f"{seed} {peer.rank}")
    pace = draw.choice([1.0, 1.0, slow])
    progress = ThreadProgress()
    solo = Solo(peer, progress, count, allreduce=ALLREDUCES[allreduce])
    computed = np.zeros(count)
    for round in range(rounds):
        compute(peer, pace * draw.random() * 1e-3)
        data = np.array([float(draw.randrange(1000)) for _ in range(count)])
        computed += data
        of, total = solo(data, round)
        assert of >= round
        assert np.array_equal(total, solo.results[of])
    progress.close()
    told = (computed, solo.taken, solo.results, solo.waiting)
    return Told(*[np.asarray(what).tolist() for what in told])


def check_solo(told: list[Told], rounds: int) -> None:
    """Compare what all ranks told.

    Integers in float64 add up exactly, in any order.
    """
    assert [len(rank.results) for rank in told] == [rounds] * len(told)  # however many initiators a round had
    for round in range(rounds):
        contributed = np.sum([rank.taken[round] for rank in told], axis=0)
        for rank in told:
            np.testing.assert_array_equal(rank.results[round], contributed)
    contributed = sum(np.sum(rank.taken, axis=0) for rank in told)
    waiting = np.sum([rank.waiting for rank in told], axis=0)
    np.testing.assert_array_equal(contributed + waiting, np.sum([rank.computed for rank in told], axis=0))


def allreduce_rounds(peer: Peer, seed: int, engine: str, kind: str, count: int, dtype: str) -> list[str]:
    """Sum random numbers in a few rounds, started at random times; return each round's bytes."""
    draw = random.Random(f"{seed} {peer.rank}")
    progress = ENGINES[engine]()
    data = np.zeros(count, dtype)
    run = progress.open(ALLREDUCES[kind](peer.rank, peer.size, data), peer, "sum")
    told = []
    for round in range(4):
        everybodys = [_numbers(seed, rank, round, count, dtype) for rank in range(peer.size)]
        data[...] = everybodys[peer.rank]
        compute(peer, draw.random() * 1e-4)
        assert run.start(round).wait() == round
        tolerance = 1e-4 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(data, np.sum(everybodys, axis=0), rtol=tolerance, atol=tolerance)
        told.append(data.tobytes().hex())
    progress.close()
    return told


def broadcast_rounds(peer: Peer, engine: str, count: int) -> None:
    """Broadcast from every root, one after the other."""
    progress = ENGINES[engine]()
    for root in range(peer.size):
        data = np.arange(count) * (peer.rank == root)
        run = progress.open(binomial_broadcast(peer.rank, peer.size, data, root), peer, f"from {root}")
        run.start(0).wait()
        np.testing.assert_array_equal(data, np.arange(count))
        run.close()
    progress.close()


def large_messages(peer: Peer) -> None:
    """Sum 8 MB, of which each message needs both ends at work until it is through."""
    progress = ThreadProgress()
    data = np.full(1_000_003, float(peer.rank))
    run = progress.open(recursive_doubling_allreduce(peer.rank, peer.size, data), peer, "large")
    expected = sum(range(peer.size)) / peer.size
    for round in range(3):
        expected *= peer.size
        run.start(round).wait()
        assert (data == expected).all()
    progress.close()


def solo_without_bells(peer: Peer, rounds: int) -> Told:
    """As `solo_rounds`, where no rank is within earshot of another."""
    with patch.object(doorbell, "_host", lambda: ["a host of its own", str(peer.rank)]):
        return solo_rounds(peer, 4, rounds, 5, "recursive doubling", 10.0)


def holds_the_gil(peer: Peer, name: str) -> float:
    """Return how long rank 0's rounds take, in seconds, while rank 1 holds its GIL for 1 s."""
    progress = ThreadProgress()
    solo = Solo(peer, progress, 5, allreduce=ALLREDUCES[name], remembers=False)
    solo(np.ones(5), 0)
    peer.allgather_bytes(b"")
    seconds = 0.0
    if peer.rank == 1:
        time.sleep(0.2)  # its progress thread has done with round 0
        ctypes.PyDLL(None).usleep(1_000_000)
    elif peer.rank == 0:
        time.sleep(0.4)  # rank 1 has begun
        begin_s = time.monotonic()
        for round in range(solo.num_rounds, solo.num_rounds + 10):
            solo(np.ones(5), round)
        seconds = time.monotonic() - begin_s
    progress.close()
    return seconds


def fail_on_rank_1(peer: Peer) -> None:
    """Fail in a progress thread whose training thread computes."""

    def fail(round: int) -> None:
        if round == 2 and peer.rank == 1:
            raise ZeroDivisionError("as planned")

    progress = ThreadProgress()
    divide = Schedule((NoOp("go"), Compute("divide", ("go",), call=fail)), ("divide",), trigger="go")
    run = progress.open(divide, peer, "gradients.0[3]")
    run.start(2)
    time.sleep(30.0)


def idle(peer: Peer) -> float:
    """Return the CPU seconds of half a second in which nothing happens, 1 s after something did."""
    progress = ThreadProgress()
    solo = Solo(peer, progress, 5)
    solo(np.ones(5), 0)
    time.sleep(1.0)
    before_s = time.process_time()
    time.sleep(0.5)
    used_s = time.process_time() - before_s
    progress.close()
    return used_s


def leave_without_closing(peer: Peer) -> None:
    """Come to the end of the script with a progress thread."""
    solo = Solo(peer, ThreadProgress(), 5)
    solo(np.ones(5), 0)


def compute(peer: Peer, seconds: float) -> None:
    """Be busy for so long, on the rank's own clock."""
    if peer.transport == "virtual":
        peer.clock.elapse(seconds)
    else:
        time.sleep(seconds)


def _numbers(seed: int, rank: int, round: int, count: int, dtype: str) -> Array:
    return np.random.default_rng([seed, rank, round]).standard_normal(count).astype(dtype)
