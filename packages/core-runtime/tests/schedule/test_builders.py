"""The schedules' shape, without carrying them out: who sends what to whom, and whom an activation reaches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hocket.schedule import (
    Receive,
    Schedule,
    Send,
    activation_broadcast,
    allgather,
    alltoall,
    binomial_allreduce,
    binomial_broadcast,
    binomial_reduce,
    rabenseifner_allreduce,
    recursive_doubling_allreduce,
    ring_allreduce,
    tree_allreduce,
)

SIZES = [*range(1, 10), 16, 17]
BUILDERS: dict[str, Callable[..., Schedule]] = {
    "recursive doubling": recursive_doubling_allreduce,
    "ring": ring_allreduce,
    "ring in parts": lambda rank, size, _: ring_allreduce(rank, size, np.zeros(size * 3 * 2**15)),
    "rabenseifner": rabenseifner_allreduce,
    "binomial": binomial_allreduce,
    "binary tree": tree_allreduce,
    "star": partial(tree_allreduce, arity=16),
    "broadcast": binomial_broadcast,
    "broadcast from the last": lambda rank, size, data: binomial_broadcast(rank, size, data, root=size - 1),
    "reduce": binomial_reduce,
    "reduce to the last": lambda rank, size, data: binomial_reduce(rank, size, data, root=size - 1),
    "alltoall": lambda rank, size, data: alltoall(rank, size, *np.zeros((2, size, 5))),
    "allgather": lambda rank, size, data: allgather(rank, size, np.zeros((size, 5))),
    "activation": lambda rank, size, data: activation_broadcast(rank, size),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("builder", BUILDERS)
def test_what_is_sent_is_received(builder: str, size: int) -> None:
    sent: Counter[tuple[int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int]] = Counter()
    for rank in range(size):
        for operation in BUILDERS[builder](rank, size, np.zeros(5)).operations:
            if isinstance(operation, Send):
                sent[rank, operation.to, operation.tag, _nbytes(operation)] += 1
            elif isinstance(operation, Receive):
                received[operation.source, rank, operation.tag, _nbytes(operation)] += 1
    assert sent == received
    assert all(source != to for source, to, *_ in sent)


@pytest.mark.parametrize("size", SIZES)
def test_everybody_hears_whoever_calls(size: int) -> None:
    stages = math.ceil(math.log2(size))
    for root in range(size):
        hops, num_notices = _activate(size, [root])
        assert sorted(hops) == list(range(size))
        assert max(hops.values()) <= stages
        assert num_notices == 2**stages - 1


@pytest.mark.parametrize("size", SIZES)
def test_whoever_is_called_twice_forwards_once(size: int) -> None:
    hops, num_notices = _activate(size, list(range(size)))
    assert set(hops.values()) == {0}
    assert num_notices == size * math.ceil(math.log2(size))


def _nbytes(message: Send | Receive) -> int:
    return -1 if message.data is None else message.data.nbytes


def _activate(size: int, roots: list[int]) -> tuple[dict[int, int], int]:
    """Carry an activation out by hand; return after how many hops each rank is active, and how many notices went."""
    schedules = [activation_broadcast(rank, size) for rank in range(size)]
    done = [{"arrive"} if rank in roots else set() for rank in range(size)]
    hops = dict.fromkeys(roots, 0)
    called = list(roots)
    num_notices = 0
    while called:
        rank = called.pop(0)
        for operation in schedules[rank].operations:
            fires = operation.name not in done[rank] and done[rank] & set(operation.after)
            if isinstance(operation, Send) and fires:
                done[rank].add(operation.name)
                num_notices += 1
                done[operation.to].add(operation.name.replace("call", "called"))
                hops.setdefault(operation.to, hops[rank] + 1)
                called.append(operation.to)
    return hops, num_notices
