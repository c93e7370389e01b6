"""On a CUDA device: what a session adds to a step beside DDP, copies to host memory, and ranks that share the device.

    python packages/core-runtime/benchmarks/gpu.py [--device cpu --small]

1. A segment's way to pinned host memory and back, against plain copies of as many bytes: the link's limit.
2. A step of a ResNet-50 in bf16, channels last: plain, in a session of one rank, in DDP with one rank.
3. The same with two ranks on this device, over host lanes: plain steps at once, against sgd's and agd's.
4. Fashion-MNIST in bf16 by `hocket run` with two ranks, where hocket-tasks and its files are there.

Ends with a table in Markdown. On a CPU it shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import hocket
from hocket.testing.compressor import make_segment

Row = tuple[str, str, str]


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.path = nn.Sequential(
            *convolution(given, width, 1, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, wide, 1, 1),
        )
        same = given == wide and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(given, wide, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def convolution(given: int, wide: int, size: int, stride: int) -> Sequence[nn.Module]:
    """Return a convolution and its normalization."""
    return nn.Conv2d(given, wide, size, stride, size // 2, bias=False), nn.BatchNorm2d(wide)


def resnet50() -> nn.Module:
    """Return a ResNet-50 for 1,000 classes: 25.6 M parameters in 161 tensors."""
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    given = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(given, 64 << stage, 2 if block == 0 and stage else 1))
            given = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def seconds_of(
    sides: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Return each side's median seconds, the device's work included; sides take turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 3):
        for name, side in sides.items():
            wait_for(device)
            start_s = time.perf_counter()
            side()
            wait_for(device)
            if turn >= 3:  # the first ones warm up
                taken[name].append(time.perf_counter() - start_s)
    return {name: median(each) for name, each in taken.items()}


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def copies(device: torch.device, megabytes: int, repeats: int) -> list[Row]:
    """Measure a segment's way to host memory and back."""
    if device.type == "cpu":
        return [("copies to host memory", "skipped: there is no device", "")]
    segment = make_segment([megabytes << 18], device=str(device))
    there = torch.empty(segment.outgoing.shape, pin_memory=True)
    seconds = seconds_of(
        {
            "plain copy out": lambda: there.copy_(segment.outgoing, non_blocking=True),
            "segment out": segment.stage_out,
            "plain copy in": lambda: segment.incoming.copy_(there, non_blocking=True),
            "segment in": segment.stage_in,
        },
        repeats,
        device,
    )
    rows = []
    for way in ("out", "in"):
        plain, own = (
            segment.wire_bytes / seconds[f"{which} {way}"] / 1e9 for which in ("plain copy", "segment")
        )
        rows.append((f"{megabytes} MiB {way}", f"{own:.1f} GB/s", f"{own / plain:.2f} of a plain copy"))
    return rows


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> Callable[[], None]:
    """Return a training step in bf16."""
    labels = torch.arange(len(inputs), device=inputs.device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def build(device: torch.device, batch: int, size: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Return a model, its optimizer and a batch on the device."""
    torch.manual_seed(0)
    net = resnet50().to(device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=device.type == "cuda")
    inputs = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return net, optimizer, inputs


def one_rank(device: torch.device, batch: int, size: int, repeats: int) -> list[Row]:
    """Measure a step of one rank: plain, in a session, in DDP."""
    sides: dict[str, Callable[[], object]] = {}
    net, optimizer, inputs = build(device, batch, size)
    sides["plain"] = step_of(net, optimizer, inputs)
    net, optimizer, inputs = build(device, batch, size)
    session = hocket.attach(net, optimizer, "agd")
    sides["session"] = step_of(net, optimizer, inputs)
    net, optimizer, inputs = build(device, batch, size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    sides["DDP"] = step_of(nn.parallel.DistributedDataParallel(net), optimizer, inputs)
    seconds = seconds_of(sides, repeats, device)
    session.close()
    dist.destroy_process_group()
    plain = seconds["plain"]
    return [
        (f"one rank, {name}", f"{1e3 * taken:.2f} ms a step", f"{taken / plain:.3f} of plain")
        for name, taken in seconds.items()
    ]


def shared(options: argparse.Namespace) -> list[Row]:
    """Measure steps of two ranks that share the device."""
    taken = {}
    for recipe in ("local", "sgd", "agd"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "seconds"
            command = [
                "-m",
                "hocket",
                "launch",
                "-n",
                "2",
                "--transport",
                "torch",
                __file__,
                "--rank",
                recipe,
            ]
            given = ["--device", options.device, "--out", str(out), *(["--small"] if options.small else [])]
            subprocess.run([sys.executable, *command, *given], check=True)
            taken[recipe] = float(out.read_text())
    return [
        (
            f"two ranks on it, {recipe}",
            f"{1e3 * seconds:.2f} ms a step",
            f"{seconds / taken['local']:.3f} of local",
        )
        for recipe, seconds in taken.items()
    ]


def shared_rank(recipe: str, device: torch.device, batch: int, size: int, repeats: int, out: Path) -> None:
    """Measure, as one of the ranks that share the device."""
    net, optimizer, inputs = build(device, batch, size)
    with hocket.attach(net, optimizer, recipe) as session:
        seconds = seconds_of({"step": step_of(net, optimizer, inputs)}, repeats, device)["step"]
        if session.is_main:
            out.write_text(str(seconds))


def fashion_mnist(options: argparse.Namespace) -> list[Row]:
    """Train Fashion-MNIST in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = ["task=fashion_mnist", "precision=bf16", f"device={options.device}", "epochs=1"]
        if options.small:
            settings.append("steps=5")
        command = [sys.executable, "-m", "hocket", "run", "agd", "-n", "2", "--transport", "torch", "-q"]
        told = subprocess.run(
            [*command, *settings, "--out", str(out)], check=False, capture_output=True, text=True
        )
        if told.returncode:
            return [("Fashion-MNIST in bf16", "did not run", (told.stderr.strip() or "?").splitlines()[-1])]
        summary = json.loads((out / "summary.json").read_text())
    speed = f"{summary['steps'] / summary['seconds']:.0f} steps/s"
    return [("Fashion-MNIST in bf16, two ranks", speed, f"{100 * summary['valid_accuracy']:.2f} %")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny images, few repeats")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    batch, size, repeats = (2, 32, 2) if options.small else (64, 224, 20)
    if options.rank:
        shared_rank(options.rank, device, batch, size, repeats, options.out)
        return
    parts: list[Callable[[], list[Row]]] = [
        partial(copies, device, 64, repeats),
        partial(one_rank, device, batch, size, repeats),
        partial(shared, options),
        partial(fashion_mnist, options),
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    print(f"{date.today()}, {name}, torch {torch.__version__}, CUDA {torch.version.cuda}\n")
    print("| what | measured | against |\n|---|---|---|", flush=True)
    for part in parts:
        for row in part():
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
