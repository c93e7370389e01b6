"""The work of ranks in these tests, virtual ones and processes alike; each rank checks it itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np

from hocket.arrays import Array
from hocket.progress import Execution, InlineProgress, ProgressEngine, ThreadProgress
from hocket.schedule import (
    Compute,
    NoOp,
    Schedule,
    activation_broadcast,
    binomial_allreduce,
    binomial_broadcast,
    chain,
    rabenseifner_allreduce,
    recursive_doubling_allreduce,
    ring_allreduce,
    tree_allreduce,
)
from hocket.transport.host import wake
from hocket.transport.peer import Peer

ENGINES: dict[str, Callable[[], ProgressEngine]] = {"thread": ThreadProgress, "inline": InlineProgress}
ALLREDUCES: dict[str, Callable[[int, int, Array], Schedule]] = {
    "recursive doubling": recursive_doubling_allreduce,
    "ring": ring_allreduce,
    "rabenseifner": rabenseifner_allreduce,
    "binomial": binomial_allreduce,
    "tree": tree_allreduce,
    "star": partial(tree_allreduce, arity=64),
}


class CalledSum:
    """A sum that whoever starts calls all others to; each rank contributes 1, and notes the sums.

    Source: the solo allreduce of eager-SGD (Li et al.), sec. 4.1.
    """

    def __init__(self, peer: Peer, progress: ProgressEngine, count: int = 5, allreduce: str = "tree") -> None:
        self.sums: list[float] = []
        data = np.zeros(count)

        def note(round: int) -> None:
            assert (data == data[0]).all()
            self.sums.append(float(data[0]))

        schedule = chain(
            ("activation", activation_broadcast(peer.rank, peer.size)),
            ("contribution", _computation(lambda round: data.fill(1.0))),
            ("sum", ALLREDUCES[allreduce](peer.rank, peer.size, data)),
            ("result", _computation(note)),
            persistent=True,
        )
        self.run = Execution(schedule, peer, progress, "called")


def _computation(call: Callable[[int], None]) -> Schedule:
    return Schedule((Compute("compute", call=call),), ("compute",))


def called_rounds(peer: Peer, seed: int, rounds: int, count: int, allreduce: str, slow: float) -> list[float]:
    """Compute for random times, round after round; one rank in three is `slow` times as slow. Return the sums."""
    draw = random.Random(f"{seed} {peer.rank}")
    pace = draw.choice([1.0, 1.0, slow])
    progress = ThreadProgress()
    called = CalledSum(peer, progress, count, allreduce)
    for round in range(rounds):
        compute(peer, pace * draw.random() * 1e-3)
        called.run.start(round).wait()
        assert called.run.num_ended > round
    progress.close()
    return called.sums


def allreduce_rounds(peer: Peer, seed: int, engine: str, kind: str, count: int, dtype: str) -> list[str]:
    """Sum random numbers in a few rounds, started at random times; return each round's bytes."""
    draw = random.Random(f"{seed} {peer.rank}")
    progress = ENGINES[engine]()
    data = np.zeros(count, dtype)
    run = Execution(ALLREDUCES[kind](peer.rank, peer.size, data), peer, progress, "sum")
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
        run = Execution(binomial_broadcast(peer.rank, peer.size, data, root), peer, progress, f"from {root}")
        run.start(0).wait()
        np.testing.assert_array_equal(data, np.arange(count))
        run.close()
    progress.close()


def large_messages(peer: Peer) -> None:
    """Sum 8 MB, of which each message needs both ends at work until it is through."""
    progress = ThreadProgress()
    data = np.full(1_000_003, float(peer.rank))
    run = Execution(recursive_doubling_allreduce(peer.rank, peer.size, data), peer, progress, "large")
    expected = sum(range(peer.size)) / peer.size
    for round in range(3):
        expected *= peer.size
        run.start(round).wait()
        assert (data == expected).all()
    progress.close()


def called_without_wakes(peer: Peer, rounds: int) -> list[float]:
    """As `called_rounds`, where no rank can wake another, as between hosts."""
    with patch.object(wake, "_host", lambda: ["a host of its own", str(peer.rank)]):
        return called_rounds(peer, 4, rounds, 5, "recursive doubling", 10.0)


def fail_on_rank_1(peer: Peer) -> None:
    """Fail in a progress thread whose training thread computes."""

    def fail(round: int) -> None:
        if round == 2 and peer.rank == 1:
            raise ZeroDivisionError("as planned")

    progress = ThreadProgress()
    divide = Schedule((NoOp("go"), Compute("divide", ("go",), call=fail)), ("divide",), trigger="go")
    run = Execution(divide, peer, progress, "gradients.0[3]")
    run.start(2)
    time.sleep(30.0)


def idle(peer: Peer) -> float:
    """Return the CPU seconds of half a second in which nothing happens, 1 s after something did."""
    progress = ThreadProgress()
    CalledSum(peer, progress).run.start(0).wait()
    time.sleep(1.0)
    before_s = time.process_time()
    time.sleep(0.5)
    used_s = time.process_time() - before_s
    progress.close()
    return used_s


def leave_without_closing(peer: Peer) -> None:
    """Come to the end of the script with a progress thread."""
    CalledSum(peer, ThreadProgress()).run.start(0).wait()


def compute(peer: Peer, seconds: float) -> None:
    """Be busy for so long, on the rank's own clock."""
    if peer.transport == "virtual":
        peer.clock.elapse(seconds)
    else:
        time.sleep(seconds)


def _numbers(seed: int, rank: int, round: int, count: int, dtype: str) -> Array:
    return np.random.default_rng([seed, rank, round]).standard_normal(count).astype(dtype)
