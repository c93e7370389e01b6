"""On a CUDA device: selection of 0.1 % against torch.topk, and the fused pass against the memory's bandwidth.

    python packages/redsync/benchmarks/gpu.py [--sizes 1 16 64] [--repeats 20]

"pass" is accumulate, test and compact on the device; "step" is the whole of it, with what the host chooses, the message
and its way to host memory. "copy" moves as many bytes as the pass must. Without a device it says so, and ends well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from measuring import medians

from hocket.compressor import OptimizerTerms
from hocket.testing.compressor import make_segment
from hocket_redsync.hybrid import Sampled, Trimmed
from hocket_redsync.kernels import Kernels, Memory, Ranking, Update, kernels_for
from hocket_redsync.residual import ResidualCompressor

DENSITY = 0.001


def step_of(compressor: ResidualCompressor, numel: int) -> Callable[[], object]:
    """Return a step of a segment of one parameter on the device."""
    segment = make_segment([numel], device="cuda")
    state = compressor.init(segment)
    segment.outgoing[:numel] = torch.randn(numel, device="cuda")
    segment.finite = True
    terms = [OptimizerTerms(segment.outgoing[:0], 0.9, 0.0)]

    def step() -> object:
        if compressor.traits.applies_optimizer_terms:
            state.take(terms, 1.0)
        return compressor.compress(segment, state, 0)

    for _ in range(30):
        step()
    return step


def sides_of(kernels: Kernels, numel: int, momentum: float, streams: int) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    k = round(DENSITY * numel)
    given, velocity, residual = torch.randn(3, numel, device="cuda")
    floor = int(Ranking.MAGNITUDE.keys(residual.abs().topk(k).values[-1:].cpu().numpy())[0])
    given *= 0
    memory = Memory(given, residual, velocity, 0)
    source = torch.zeros(numel * streams // 2, device="cuda")
    target = torch.empty_like(source)
    plain = {"dense_below_kb": 0.0, "correct_momentum": bool(momentum)}
    update = Update(momentum)
    return {
        "torch.topk": lambda: residual.abs().topk(k),
        "copy": lambda: target.copy_(source),
        "pick": lambda: kernels.advance(memory, None, Ranking.MAGNITUDE, floor, 16 * k),
        "pass": lambda: kernels.advance(memory, update, Ranking.MAGNITUDE, floor, 16 * k),
        "step, trimmed": step_of(Trimmed(DENSITY, **plain), numel),
        "step, sampled": step_of(Sampled(DENSITY, **plain), numel),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64], help="in 2**20 elements")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    kernels = kernels_for(torch.device("cuda", torch.cuda.current_device()))
    for size in options.sizes:
        numel = int(size * (1 << 20))
        for momentum, streams in ((0.0, 3), (0.9, 5)):
            seconds = medians(
                sides_of(kernels, numel, momentum, streams), options.repeats, torch.cuda.synchronize
            )
            print(f"{size:g} M elements, {streams} streams, {torch.cuda.get_device_name()}")
            for name, taken in seconds.items():
                ratios = f"{seconds['torch.topk'] / taken:7.1f}x torch.topk  {taken / seconds['copy']:6.2f} of copy"
                print(f"  {name:>14}: {1e3 * taken:9.3f} ms  {ratios}")
            print(json.dumps({"numel": numel, "momentum": momentum, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
