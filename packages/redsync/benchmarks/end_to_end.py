"""Time per step on a network of limited bandwidth: Hocket's sgd, DistributedDataParallel on Gloo, and RedSync.

    sudo tools/netlab --hosts 4 --rate 100mbit run -n 4 -- \\
        .venv/bin/python packages/redsync/benchmarks/end_to_end.py [--models vgg lstm resnet] [--scale 0.1]
        [--compute-s 0.05] [--repeats 5] [--density 0.001] [--sides sgd redsync ...] [--out FILE]

or under any mpiexec. Three models by the sizes of their parameters, whose numbers are multiplied by `--scale`: VGG-16
(138 M), a two-layer LSTM of 1,500 units with a vocabulary of 10,000 (66 M), ResNet-50 (25 M). A gradient is a constant
with noise: what it costs to compute is `--compute-s`, in which the process waits as it would for an accelerator. Every
side makes its steps in the same job, in turns; times are medians of the slowest rank's. `predicted` is what the cost
model says of the network that it has measured; from so many ranks on that dense is better can be seen with a density at
which these are few: run with more and more hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hocket
from hocket.collective.sparse import SparseAlgorithm
from hocket.plan.layout import gradient_layout
from hocket.progress import InlineProgress
from hocket.segment.partition import Bytes, named_spans, partition
from hocket.transport.peer import Peer, gather
from hocket_redsync.calibration import calibrate
from hocket_redsync.choosing import choose, first_dense_size
from hocket_redsync.hybrid import Hybrid

_PORT = 29_411


def _resnet() -> list[int]:
    sizes = [9_408]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [channels * width, 9 * width * width, 4 * width * width]
            if block == 0:
                sizes.append(channels * 4 * width)
            sizes += [width, width, width, width, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, 2_048_000, 1_000]


_VGG_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)

#: Elements of each parameter, in the model's order.
MODELS = {
    "vgg": [
        *(9 * a * b for a, b in pairwise(_VGG_CHANNELS)),
        25_088 * 4_096,
        4_096 * 4_096,
        4_096 * 1_000,
    ],
    "lstm": [10_000 * 1_500, *[4 * 1_500 * 1_500] * 4, *[4 * 1_500] * 4, 10_000 * 1_500, 10_000],
    "resnet": _resnet(),
}

DENSE = ("sgd", "agd", "ddp")
SIDES = ("local", *DENSE, "redsync", "redsync.asq", "redsync.auto")


class Model(nn.Module):
    """Parameters of given sizes, whose gradients are known and cost next to nothing."""

    def __init__(self, sizes: Sequence[int], rank: int, compute_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)
        generator = torch.Generator().manual_seed(rank)
        self._gradients = [torch.randn(size, generator=generator) for size in sizes]
        self._compute_s = compute_s

    def forward(self) -> Tensor:
        time.sleep(self._compute_s)  # in place of the accelerator's work
        products = (layer(g) for layer, g in zip(self.layers, self._gradients, strict=True))
        return torch.stack(list(products)).sum()


def measure(peer: Peer, sizes: Sequence[int], options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return each side's seconds per step, and of a step's bytes what this rank has counted."""

    def stepping(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            net().backward()
            optimizer.step()

        return step

    sides: dict[str, Callable[[], None]] = {}
    sessions = {}
    for name in options.sides:
        net: nn.Module = Model(sizes, peer.rank, options.compute_s)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
        if name == "ddp":
            net = nn.parallel.DistributedDataParallel(net)
        elif name != "local":
            compressed = ["gradients.0.segments=bytes", f"gradients.0.compressor.density={options.density}"]
            overrides = compressed if name.startswith("redsync") else []
            sessions[name] = hocket.attach(net, optimizer, hocket.compose(name, *overrides), peer=peer)
        sides[name] = stepping(net, optimizer)
    barrier = peer.lane("start")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(options.repeats + 1):
        for name, step in sides.items():
            barrier.ibarrier().wait()
            start_s = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start_s)
    told = gather(peer, seconds)
    result = {}
    for name in sides:
        slowest = median(map(max, zip(*(of_rank[name] for of_rank in told), strict=True)))
        nbytes = sessions[name].counters.bytes_sent / (options.repeats + 1) if name in sessions else 0.0
        result[name] = (slowest, nbytes)
    barrier.close()
    for session in sessions.values():
        session.close()
    return result


def predict(peer: Peer, sizes: Sequence[int], density: float) -> dict[str, float | int | None]:
    """Return what the cost model says, in seconds of communication and selection."""
    costs = calibrate(peer, InlineProgress(), torch.device("cpu"))
    spans = named_spans(
        (f"layers.{i}.weight", torch.empty(size, device="meta")) for i, size in enumerate(sizes)
    )
    shapes = [gradient_layout(cut) for cut in partition(spans, Bytes(), backward=True)]
    compressor = Hybrid(density=density)
    nbytes = 4 * sum(sizes)
    dense_s = len(shapes) * costs.reduce_latency(peer.size) + costs.dense_seconds(nbytes, peer.size)
    return {
        "sgd": dense_s,
        "redsync.auto": sum(
            choose(compressor, shape, peer.size, costs, auto=True, algorithm=SparseAlgorithm.AUTO).seconds
            for shape in shapes
        ),
        "dense_from_ranks": first_dense_size(compressor, shapes, costs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--compute-s", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    peer = hocket.join()
    host = "host0" if "NETLAB_HOST" in os.environ else "127.0.0.1"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{_PORT}",
        rank=peer.rank,
        world_size=peer.size,
        timeout=timedelta(minutes=10),
    )
    results = {}
    for model in options.models:
        sizes = [max(1, round(options.scale * size)) for size in MODELS[model]]
        predicted = predict(peer, sizes, options.density)
        measured = measure(peer, sizes, options)
        results[model] = {"measured": measured, "predicted": predicted, "numel": sum(sizes)}
        if peer.rank == 0:
            report(model, peer.size, sizes, measured, predicted)
    if peer.rank == 0 and options.out is not None:
        options.out.write_text(
            json.dumps({"ranks": peer.size, **vars(options), "results": results}, default=str)
        )
    dist.destroy_process_group()
    peer.close()


def report(
    model: str,
    ranks: int,
    sizes: Sequence[int],
    measured: dict[str, tuple[float, float]],
    predicted: dict[str, float | int | None],
) -> None:
    """Print what each side takes, and how often it goes into the faster of the two dense ones."""
    dense_s = min(seconds for name, (seconds, _) in measured.items() if name in DENSE)
    print(f"{model}-like, {sum(sizes):,} parameters, {ranks} ranks; predicted: {json.dumps(predicted)}")
    for name, (seconds, nbytes) in measured.items():
        print(
            f"  {name:>13}: {1e3 * seconds:9.1f} ms  {dense_s / seconds:6.2f}x  {nbytes / 1e6:9.3f} MB sent",
            flush=True,
        )


if __name__ == "__main__":
    main()
