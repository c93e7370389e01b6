"""Passes in pieces and on several threads, and that no step pays for compilation."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.compressor import Message
from hocket.testing.compressor import dense, fill, make_segment, run_round
from hocket_redsync.asq import Asq
from hocket_redsync.hybrid import Hybrid
from hocket_redsync.kernels import Memory, Ranking, Update, kernels_for, loops
from hocket_redsync.kernels.threads import in_pieces

CPU = kernels_for(torch.device("cpu"))
#: Numba's dispatchers, which have no types.
KERNELS: tuple[Any, ...] = (loops.advance, loops.is_below, loops.clear, loops.add_message)


@given(st.integers(0, 3 << 20), st.integers(1, 7))
def test_pieces_cover_everything_once_and_in_order(numel: int, threads: int) -> None:
    torch.set_num_threads(threads)
    pieces = in_pieces(numel, lambda start, stop: (start, stop))
    assert len(pieces) <= threads
    assert pieces[0][0] == 0
    assert pieces[-1][1] == numel
    assert all(first[1] == second[0] for first, second in pairwise(pieces))


def advanced(seed: int, numel: int) -> list[bytes]:
    generator = torch.Generator().manual_seed(seed)
    given, velocity, residual = torch.randn(3, numel, generator=generator)
    memory = Memory(given, residual, velocity, 3)
    floor = int(Ranking.MAGNITUDE.keys(np.array([3.0], np.float32))[0])
    [found] = CPU.collect([CPU.advance(memory, Update(0.9), Ranking.MAGNITUDE, floor, numel)])
    return [part.tobytes() for part in (found.indices, found.values, residual.numpy(), velocity.numpy())]


def test_more_threads_give_the_same_bits() -> None:
    numel = (1 << 20) + 13
    alone = advanced(0, numel)
    torch.set_num_threads(4)
    assert advanced(0, numel) == alone


def test_ranks_that_are_threads_may_call_at_once() -> None:
    numel = 1 << 20
    expected = [advanced(seed, numel) for seed in range(4)]
    torch.set_num_threads(2)
    got: dict[int, list[bytes]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: got.update({seed: advanced(seed, numel)}))
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[seed] for seed in range(4)] == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 70_001, (1 << 20) + 4])
def test_one_that_is_not_finite_is_found_wherever_it_is(bad: float, place: int) -> None:
    torch.set_num_threads(3)
    data = torch.full(((1 << 20) + 5,), -3e38)
    assert CPU.is_finite(data)
    data[place] = bad
    assert not CPU.is_finite(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_step_pays_for_compilation(dtype: torch.dtype) -> None:
    """Every kernel call, with messages as from a transport, was compiled when the state was made."""
    compressors = (Hybrid(0.05, dense_below_kb=1.0), Asq(0.05, dense_below_kb=0.0, correct_momentum=False))
    known = [len(kernel.signatures) for kernel in KERNELS]
    for compressor in compressors:
        segment = make_segment([90, 700, 0], dtype, 3, index=1)
        state = compressor.init(segment)
        for round in range(3):
            fill(segment, round)
            message = run_round(compressor, segment, state, round)
            received = message.payload.copy()
            dense(compressor, Message(received, segment, round))
            received.flags.writeable = False
            compressor.accumulate(Message(received, segment, round), 0.5, torch.zeros_like(segment.outgoing))
    assert [len(kernel.signatures) for kernel in KERNELS] == known
