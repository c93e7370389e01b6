"""The whole step on a rank (accumulate, select, compact, clear, pack) against moving the streams that it needs.

Streams of the residual alone: G and V are read, V is written; with momentum also u is read and written. "copy" is the
time in which `Tensor.copy_` of as many bytes reads and writes them in this process: half as many elements each way.
"core" is core's momentum_correction(error_feedback(topk)), or error_feedback(topk). Each step gets another gradient,
so that thresholds move. And what a rank does with the messages that come: RedSync's addition against core's, and the
zeros below them. Sizes are in 2**20 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

from hocket.compressor import Compressor, ErrorFeedback, Message, MomentumCorrection, OptimizerTerms, TopK
from hocket.testing.compressor import make_segment
from hocket_redsync.hybrid import Sampled, Trimmed

DENSITY = 0.001
_NUM_GRADIENTS = 3


def copy(numel: int, momentum: bool) -> Callable[[], object]:
    source = torch.zeros(numel * (5 if momentum else 3) // 2)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def of_core(numel: int, momentum: bool) -> Callable[[], object]:
    core: Compressor = ErrorFeedback(TopK(DENSITY))
    return step_of(MomentumCorrection(core) if momentum else core, numel)


def of_redsync(
    method: type[Trimmed] | type[Sampled], numel: int, momentum: bool, finite_known: bool = True
) -> Callable[[], object]:
    compressor = method(DENSITY, dense_below_kb=0.0, correct_momentum=momentum)
    return step_of(compressor, numel, finite_known=finite_known)


WAYS: dict[str, Callable[[int, bool], Callable[[], object]]] = {
    "copy": copy,
    "trimmed": lambda numel, momentum: of_redsync(Trimmed, numel, momentum),
    "sampled": lambda numel, momentum: of_redsync(Sampled, numel, momentum),
    "sampled, checks": lambda numel, momentum: of_redsync(Sampled, numel, momentum, finite_known=False),
    "core": of_core,
}


def step_of(compressor: Compressor, numel: int, *, finite_known: bool = True) -> Callable[[], object]:
    """Return a step of a segment of one parameter, which has other gradients in each."""
    segments = [make_segment([numel]) for _ in range(_NUM_GRADIENTS)]
    for seed, segment in enumerate(segments):
        segment.outgoing[:numel] = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        segment.finite = True if finite_known else None
    state = compressor.init(segments[0])
    parameter = torch.zeros(1).expand(numel)
    rounds: Iterator[int] = count()

    def step() -> object:
        round = next(rounds)
        segment = segments[round % _NUM_GRADIENTS]
        if compressor.traits.applies_optimizer_terms:
            state.take([OptimizerTerms(parameter, 0.9, 0.0)], 1.0)
        return compressor.compress(segment, state, round)

    for _ in range(30):  # residuals grow at first
        step()
    return step


def messages_of(compressor: Compressor, numel: int, ranks: int) -> list[Message]:
    """Return as many messages for one segment."""
    segment = make_segment([numel])
    messages = []
    for rank in range(ranks):
        segment.outgoing[:numel] = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        messages.append(compressor.compress(segment, compressor.init(segment), 0))
    return messages


@pytest.mark.parametrize("momentum", [False, True], ids=["3 streams", "5 streams"])
@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("way", WAYS)
def bench_fused_step(benchmark: Any, way: str, size: int, momentum: bool) -> None:
    benchmark.group = f"step of {size} M elements, {5 if momentum else 3} streams"
    # A multiple of 6 has each step of sampled's cycle.
    benchmark.pedantic(WAYS[way](size << 20, momentum), rounds=18, warmup_rounds=1)


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("way", ["zero", "core", "redsync"])
def bench_decompression(benchmark: Any, way: str, ranks: int) -> None:
    numel = 16 << 20
    benchmark.group = f"messages of {ranks} ranks into 16 M elements"
    out = torch.zeros(numel)
    compressor: Compressor = TopK(DENSITY)
    if way == "redsync":
        compressor = Trimmed(DENSITY, dense_below_kb=0.0, correct_momentum=False)
    messages = [] if way == "zero" else messages_of(compressor, numel, ranks)

    def add() -> None:
        for message in messages:
            compressor.accumulate(message, 1.0, out)

    benchmark.pedantic(out.zero_ if way == "zero" else add, rounds=9, warmup_rounds=1)
