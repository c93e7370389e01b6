"""Selection of 0.1 %: RedSync's methods against torch.topk and np.argpartition of |x|, in one process.

"trimmed, cold" and "threshold, cold" know nothing of the residual: a sample, a pass, a partition of candidates.
"trimmed" knows the last step's floor, "sampled" its threshold, as in steps that follow each other. What selects does
not change the residual. Sizes are in 2**20 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from measuring import DISTRIBUTIONS, residual

from hocket_redsync.kernels import Found, Memory, Ranking, kernels_for
from hocket_redsync.kernels.api import NOTHING_PASSES
from hocket_redsync.selection import Method, Selected, capacity_of, select

DENSITY = 0.001
WAYS = ["torch.topk", "np.argpartition", "read", "trimmed, cold", "threshold, cold", "trimmed", "sampled"]


@cache
def selections(distribution: str, numel: int) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    values = residual(distribution, numel)
    kernels = kernels_for(values.device)
    k, capacity = round(DENSITY * numel), capacity_of(round(DENSITY * numel), numel)
    memory = Memory(values, values, None, 0)

    def run(method: Method, floor: int, age: int = 0) -> Selected:
        known = floor != NOTHING_PASSES[4]
        # Where no floor is known, the pass that accumulates finds nothing, and is not part of the selection.
        handle = kernels.advance(memory, None, Ranking.MAGNITUDE, floor, capacity if known else 0)
        [found] = kernels.collect([handle])
        return select(kernels, memory, Ranking.MAGNITUDE, method, k, found, floor, age)

    nothing = Found(np.empty(0, np.int32), np.empty(0, np.float32), 0)

    def cold(method: Method) -> Callable[[], object]:
        return partial(select, kernels, memory, Ranking.MAGNITUDE, method, k, nothing, NOTHING_PASSES[4], 0)

    trimmed_floor = run(Method.TRIMMED, NOTHING_PASSES[4]).floor
    threshold = run(Method.SAMPLED, NOTHING_PASSES[4]).floor
    array = values.numpy()
    calls: list[Callable[[], object]] = [
        lambda: torch.topk(values.abs(), k),
        lambda: np.argpartition(np.abs(array), numel - k)[numel - k :],
        values.sum,
        cold(Method.TRIMMED),
        cold(Method.THRESHOLD),
        lambda: run(Method.TRIMMED, trimmed_floor),
        lambda: run(Method.SAMPLED, threshold, age=1),
    ]
    return dict(zip(WAYS, calls, strict=True))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("way", WAYS)
def bench_selection(benchmark: Any, way: str, size: int, distribution: str) -> None:
    benchmark.group = f"selection from {size} M elements, {distribution}, {torch.get_num_threads()} threads"
    benchmark.pedantic(selections(distribution, size << 20)[way], rounds=7, warmup_rounds=1)
