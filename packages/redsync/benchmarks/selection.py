"""Selection of 0.1 %: RedSync's methods against torch.topk and np.argpartition of |x|, in one process.

    python packages/redsync/benchmarks/selection.py [--sizes 1 16 64] [--threads N] [--repeats N] [--distributions ...]

"trimmed, cold" and "threshold, cold" know nothing of the residual: a sample, a pass, a partition of candidates.
"trimmed" knows the last step's floor, "sampled" its threshold, as in steps that follow each other. What selects does
not change the residual. A line of JSON follows each table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from measuring import DISTRIBUTIONS, medians, residual

from hocket_redsync.kernels import Found, Memory, Ranking, kernels_for
from hocket_redsync.kernels.api import NOTHING_PASSES
from hocket_redsync.selection import Method, Selected, capacity_of, select

DENSITY = 0.001


def selections(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    kernels = kernels_for(values.device)
    numel = len(values)
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
    return {
        "torch.topk": lambda: torch.topk(values.abs(), k),
        "np.argpartition": lambda: np.argpartition(np.abs(array), numel - k)[numel - k :],
        "read": values.sum,
        "trimmed, cold": cold(Method.TRIMMED),
        "threshold, cold": cold(Method.THRESHOLD),
        "trimmed": lambda: run(Method.TRIMMED, trimmed_floor),
        "sampled": lambda: run(Method.SAMPLED, threshold, age=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64], help="in 2**20 elements")
    parser.add_argument("--distributions", nargs="+", default=list(DISTRIBUTIONS), choices=DISTRIBUTIONS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for size in options.sizes:
        numel = int(size * (1 << 20))
        for distribution in options.distributions:
            seconds = medians(selections(residual(distribution, numel)), options.repeats)
            print(
                f"{size:g} M elements, {distribution}, {options.threads} threads, torch {torch.__version__}"
            )
            for name, taken in seconds.items():
                ratios = (
                    f"{seconds[other] / taken:7.1f}x {other}" for other in ("torch.topk", "np.argpartition")
                )
                print(f"  {name:>16}: {1e3 * taken:9.3f} ms  {'  '.join(ratios)}")
            print(json.dumps({"numel": numel, "distribution": distribution, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
