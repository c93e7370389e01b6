"""The step of Hocket's recipes, without an override, over that of DistributedDataParallel on Gloo, all in one job.

    sudo tools/netlab --hosts 4 --rate 1gbit run --env -- \\
        .venv/bin/python packages/core-runtime/benchmarks/against_ddp.py [--models vgg resnet lstm gpt2]
        [--recipes agd sgd "agd gradients.0.segments=layers"] [--scale 1] [--compute-s 0.05] [--seconds 6]

or under torchrun, mpiexec or `hocket launch -n 4`. Four models by the sizes of their tensors: VGG-16, ResNet-50 and a
two-layer LSTM with a tenth of their parameters, and a GPT-2 of 25 M; `--scale` multiplies the sizes. A gradient is a
product, which autograd computes. What an accelerator would take is `--compute-s`, for which the process waits: a third
of it passes before forward, the rest from backward's begin on, for each tensor by its size, before its gradient comes.
The sides take turns; times are medians of the slowest rank's.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from measuring import init_gloo, medians
from torch import Tensor, nn

import hocket
from hocket.transport.peer import Peer

_VGG_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
_GPT2_WIDTH = 384
_LEAST_REPEATS, _MOST_REPEATS = 3, 30
# Shorter sleeps would take longer than asked for, on cores that ranks share.
_LEAST_SLEEP_S = 1e-3


def _resnet50() -> list[int]:
    sizes = [9_408, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for convolution in (channels * width, 9 * width * width):
                sizes += [convolution, width, width]
            sizes += [4 * width * width, 4 * width, 4 * width]
            if block == 0:
                sizes += [channels * 4 * width, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, 2_048_000, 1_000]


def _gpt2(width: int, blocks: int) -> list[int]:
    norm = [width, width]
    attention = [3 * width * width, 3 * width, width * width, width]
    mlp = [4 * width * width, 4 * width, 4 * width * width, width]
    return [10_000 * width, 256 * width, *[*norm, *attention, *norm, *mlp] * blocks, *norm]


def _tenth(sizes: Sequence[int]) -> list[int]:
    return [max(1, size // 10) for size in sizes]


#: Elements of each parameter, in the model's order.
MODELS = {
    "vgg": _tenth(
        [*(9 * a * b for a, b in pairwise(_VGG_CHANNELS)), 25_088 * 4_096, 4_096 * 4_096, 4_096 * 1_000]
    ),
    "resnet": _tenth(_resnet50()),
    "lstm": _tenth(
        [10_000 * 1_500, *[*[4 * 1_500 * 1_500] * 2, *[4 * 1_500] * 2] * 2, 10_000 * 1_500, 10_000]
    ),
    "gpt2": _gpt2(_GPT2_WIDTH, blocks=12),
}


class _Pause(torch.autograd.Function):
    """The identity, whose backward waits until a time, as for an accelerator."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, end_s: float) -> Tensor:
        ctx.end_s = end_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        left_s = ctx.end_s - time.perf_counter()
        if left_s > _LEAST_SLEEP_S:
            time.sleep(left_s)
        return gradients[0], None


class _Model(nn.Module):
    """Parameters of given sizes, one behind the other, whose gradients are known products."""

    def __init__(self, inputs: Sequence[Tensor], compute_s: float) -> None:
        super().__init__()
        sizes = [each.numel() for each in inputs]
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)
        self._inputs = inputs
        self._forward_s = compute_s / 3
        # Of backward, from its begin on: its first tensor is the model's last.
        later = accumulate(reversed(sizes))
        self._backward_s = [2 / 3 * compute_s * numel / sum(sizes) for numel in reversed(list(later))]

    def forward(self) -> Tensor:
        time.sleep(self._forward_s)
        value, now_s = torch.zeros(1), time.perf_counter()
        for layer, its, seconds in zip(self.layers, self._inputs, self._backward_s, strict=True):
            value = _Pause.apply(value + layer(its), now_s + seconds)  # type: ignore[no-untyped-call]
        return value.sum()


def measure(peer: Peer, sizes: Sequence[int], options: argparse.Namespace) -> dict[str, float]:
    """Return each side's seconds of a step, DDP's first."""
    generator = torch.Generator().manual_seed(peer.rank)
    inputs = [torch.randn(size, generator=generator) for size in sizes]

    def stepping(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            net().backward()
            optimizer.step()

        return step

    sides, sessions = [], []
    for name in ("ddp", *options.recipes):
        torch.manual_seed(0)
        net: nn.Module = _Model(inputs, options.compute_s)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
        if name == "ddp":
            net = nn.parallel.DistributedDataParallel(net)
        else:
            sessions.append(hocket.attach(net, optimizer, hocket.compose(*shlex.split(name)), peer=peer))
        sides.append((name, stepping(net, optimizer)))
    together_s = sum(medians(peer, sides, 1).values())
    repeats = min(max(round(options.seconds / together_s), _LEAST_REPEATS), _MOST_REPEATS)
    taken = medians(peer, sides, repeats)
    for session in sessions:
        session.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=["agd", "sgd"], help="each with its overrides")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--compute-s", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each model's turns that count")
    given = parser.parse_args()
    torch.set_num_threads(1)
    peer = hocket.join()
    init_gloo(peer)
    if peer.rank == 0:
        print(f"{peer.size} ranks over {peer.transport}, torch {torch.__version__}: ms a step (over DDP's)")
    for name in given.models:
        sizes = [max(1, round(given.scale * size)) for size in MODELS[name]]
        taken = measure(peer, sizes, given)
        if peer.rank == 0:
            columns = [f"{side} {1e3 * s:.1f} ({s / taken['ddp']:.2f})" for side, s in taken.items()]
            print(
                f"{name:>6}, {sum(sizes) / 1e6:4.1f} M in {len(sizes):3} tensors: {', '.join(columns)}",
                flush=True,
            )
    dist.destroy_process_group()
    peer.close()


if __name__ == "__main__":
    main()
