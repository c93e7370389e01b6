"""The whole step on a rank (accumulate, select, compact, clear, pack) against moving the streams that it needs.

    python packages/redsync/benchmarks/fused_step.py [--sizes 1 16 64] [--threads N] [--repeats N]

Streams of the residual alone: G and V are read, V is written; with momentum also u is read and written. "copy" is the
time in which `Tensor.copy_` of as many bytes reads and writes them in this process: half as many elements each way.
"core" is core's momentum_correction(error_feedback(topk)), or error_feedback(topk). Each step gets another gradient,
so that thresholds move. A line of JSON follows each table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import count

import torch
from measuring import medians

from hocket.compressor import Compressor, ErrorFeedback, MomentumCorrection, OptimizerTerms, TopK
from hocket.testing.compressor import make_segment
from hocket_redsync.hybrid import Sampled, Trimmed

DENSITY = 0.001
_NUM_GRADIENTS = 3


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
        if compressor.applies_optimizer_terms:
            compressor.take(segment, state, [OptimizerTerms(parameter, 0.9, 0.0)], 1.0)
        return compressor.compress(segment, state, round)

    for _ in range(30):  # residuals grow at first
        step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64], help="in 2**20 elements")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--repeats", type=int, default=18, help="a multiple of 6 has each step of sampled's cycle"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for size in options.sizes:
        numel = int(size * (1 << 20))
        for momentum, streams in ((False, 3), (True, 5)):
            source = torch.zeros(numel * streams // 2)
            target = torch.zeros_like(source)
            plain = {"dense_below_kb": 0.0, "correct_momentum": momentum}
            core: Compressor = ErrorFeedback(TopK(DENSITY))
            sides = {
                "copy": lambda source=source, target=target: target.copy_(source),
                "trimmed": step_of(Trimmed(DENSITY, **plain), numel),
                "sampled": step_of(Sampled(DENSITY, **plain), numel),
                "sampled, checks": step_of(Sampled(DENSITY, **plain), numel, finite_known=False),
                "core": step_of(MomentumCorrection(core) if momentum else core, numel),
            }
            seconds = medians(sides, options.repeats)
            print(
                f"{size:g} M elements, {streams} streams, {options.threads} threads, torch {torch.__version__}"
            )
            for name, taken in seconds.items():
                print(f"  {name:>16}: {1e3 * taken:9.3f} ms  {taken / seconds['copy']:6.2f} of copy")
            print(json.dumps({"numel": numel, "momentum": momentum, "seconds": seconds}), flush=True)
            del sides


if __name__ == "__main__":
    main()
