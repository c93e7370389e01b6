"""Validation error on Fashion-MNIST of sequential SGD and of the weight policies, at a low and at a high learning rate.

    python packages/eapipe/benchmarks/fashion_mnist.py [--jobs 2] [--out DIR] [--stages 4 8 50] [--steps N] [--seeds N]

A deep but narrow CNN of residual blocks with BatchNorm (16 blocks of 8 channels for 4 and 8 stages, 48 for 50, so that
stem, blocks and head are a stage each), batches of 64, SGD with momentum 0.9, a constant learning rate. All stages are
virtual ones of one process, which gives the numbers of as many ranks. Three seeds for 4 and 8 stages, one for 50.

Each cell of the table is a file in the folder, with its curve: what is there already is not run again. The table is
`errors.md`, the curves are `curves-N.png`: the pictures show what the paper's Fig. 3 and 4 do.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hocket
from hocket.task.samples import BatchedSamples
from hocket_eapipe import Pipeline
from hocket_tasks.fashion_mnist import FashionMNIST

BATCH = 64
CHANNELS = 8
MOMENTUM = 0.9

#: How many times the model is evaluated, evenly over a run, on how many held-out samples; on all of them at its end.
POINTS = 25
POINT_SAMPLES = 2000

SEQUENTIAL = "sequential SGD"
POLICIES = {
    SEQUENTIAL: "flush",
    "naive": "naive",
    "PipeDream": "stashing",
    "vertical sync": "vertical_sync",
    "SpecTrain": "spectrain",
    "EA-Pipe": "elastic",
}

#: Blocks and steps for each number of stages; about a minute a run on one core.
BLOCKS = {4: 16, 8: 16, 50: 48}
STEPS = {4: 1000, 8: 1000, 50: 600}

#: Learning rates. The high one is about the highest with which sequential SGD still trains whatever the seed: with 16
#: blocks seed 0 learns nothing with 0.02 and 0.05, though it does with 0.03.
RATES = {"low": 0.003, "high": 0.01}


class Block(nn.Module):
    """x + relu(norm(conv(x))): what is one layer, so that a stage may begin at each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def network(num_blocks: int) -> nn.Sequential:
    """Return stem, blocks and head; images of 28 x 28 are 14 x 14 in between."""
    stem = [nn.Conv2d(1, CHANNELS, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    head = [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(CHANNELS * 49, 10)]
    return nn.Sequential(
        _Layer(*stem),
        *(Block() for _ in range(num_blocks)),
        _Layer(*head),
    )


class _Layer(nn.Module):
    """Several modules that stay in one stage."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    policy: str
    stages: int
    rate: str
    seed: int
    steps: int

    @property
    def blocks(self) -> int:
        """The number of its network's blocks."""
        return BLOCKS[self.stages]

    @property
    def learning_rate(self) -> float:
        """Its learning rate in figures."""
        return RATES[self.rate]

    @property
    def file(self) -> str:
        """The name of its file; sequential SGD is the same run for 4 and 8 stages."""
        stages = f"{self.blocks}-blocks" if self.policy == SEQUENTIAL else str(self.stages)
        policy = self.policy.replace(" ", "-")
        return f"{policy}-{stages}-{self.learning_rate:g}-{self.seed}-{self.steps}.json"

    def engine(self) -> Pipeline:
        """Return the engine; EA-Pipe as the paper ran it: tau 1, alpha 0.3 on 4 and 8 nodes, 0.1 on 50."""
        stages = 1 if self.policy == SEQUENTIAL else self.stages
        alpha = 0.1 if self.stages == 50 else 0.3
        return Pipeline(stages=stages, policy=POLICIES[self.policy], balance="layers", alpha=alpha)


def train(cell: Cell, out: Path) -> dict[str, Any]:
    """Train, unless it has been done, and return the curve: steps, and errors in per cent."""
    path = out / cell.file
    if not path.exists():
        torch.set_num_threads(1)
        found = hocket.virtual(1).run(lambda: _curve(cell))[0]
        path.write_text(json.dumps(found))
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def _curve(cell: Cell) -> dict[str, Any]:
    data = FashionMNIST().data(cell.seed)
    assert isinstance(data.train, BatchedSamples)
    assert isinstance(data.valid, BatchedSamples)
    torch.manual_seed(cell.seed)
    model = network(cell.blocks)
    order = torch.Generator().manual_seed(cell.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=cell.learning_rate, momentum=MOMENTUM)
    steps, errors = [], []
    every = max(1, cell.steps // POINTS)
    indices: list[int] = []
    with hocket.attach(model, optimizer, {}, engine=cell.engine()) as session:
        for step in range(1, cell.steps + 1):
            if len(indices) < BATCH:
                indices = torch.randperm(len(data.train), generator=order).tolist()
            chosen, indices = indices[:BATCH], indices[BATCH:]
            result = session.train_batch(data.train[chosen], cross_entropy)
            assert result is not None
            if step % every == 0 or step == cell.steps:
                # The master as it is: the pipeline is not drained for it, as that would change the run.
                steps.append(step)
                count = len(data.valid) if step == cell.steps else POINT_SAMPLES
                errors.append(_error(model, data.valid, count))
            if not math.isfinite(float(result.loss)):
                break
    return {"steps": steps, "errors": errors, "diverged": not math.isfinite(float(result.loss))}


@torch.no_grad()
def _error(model: nn.Module, samples: BatchedSamples, count: int) -> float:
    """Return the share of wrong answers to the first `count` samples, in per cent."""
    model.eval()
    wrong = 0
    for start in range(0, count, 1000):
        inputs, target = samples[list(range(start, min(start + 1000, count)))]
        wrong += int((model(inputs).argmax(1) != target).sum())
    model.train()
    return 100 * wrong / count


def table(found: dict[Cell, dict[str, Any]], all_stages: Sequence[int]) -> Iterator[str]:
    """Yield markdown: the error at the end, mean and deviation over seeds, and the jumps of its curve.

    A curve's jumps are the mean of its rises from one evaluation to the next, in the second half of the run.
    """
    columns = [(stages, rate) for stages in all_stages for rate in RATES]
    titles = [f"{stages} stages, {RATES[rate]:g}" for stages, rate in columns]
    yield "| policy | " + " | ".join(titles) + " |"
    yield "|---|" + "---:|" * len(columns)
    for policy in POLICIES:
        texts = []
        for stages, rate in columns:
            curves = [
                c
                for cell, c in found.items()
                if (cell.policy, cell.stages, cell.rate) == (policy, stages, rate)
            ]
            last = [90.0 if curve["diverged"] else curve["errors"][-1] for curve in curves]
            spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
            jumps = statistics.mean(_jumps(curve["errors"]) for curve in curves)
            texts.append(f"{statistics.mean(last):.2f}{spread} (jumps {jumps:.2f})")
        yield f"| {policy} | " + " | ".join(texts) + " |"


def _jumps(errors: Sequence[float]) -> float:
    half = errors[len(errors) // 2 :]
    return statistics.mean(max(0.0, b - a) for a, b in pairwise(half)) if len(half) > 1 else 0.0


def draw(found: dict[Cell, dict[str, Any]], stages: int, path: Path) -> None:
    """Draw the first seed's curve of each policy with so many stages: a panel for each learning rate."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(RATES), figsize=(11, 4), sharey=True)
    for panel, (rate, value) in zip(panels, RATES.items(), strict=True):
        for policy in POLICIES:
            for cell, curve in found.items():
                if (cell.policy, cell.stages, cell.rate, cell.seed) == (policy, stages, rate, 0):
                    panel.plot(curve["steps"], curve["errors"], label=policy)
        panel.set_title(f"{stages} stages, learning rate {value:g}")
        panel.set_xlabel("batches")
    panels[0].set_ylabel("validation error in per cent")
    panels[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run what is missing, print the table and draw the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/eapipe-fashion-mnist"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--stages", type=int, nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--steps", type=int, help="in place of each number of stages' own")
    parser.add_argument("--seeds", type=int, default=3, help="for 50 stages never more than one")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cells = [
        Cell(policy, stages, rate, seed, given.steps or STEPS[stages])
        for seed in range(given.seeds)
        for stages in given.stages
        for rate in RATES
        for policy in POLICIES
        if seed == 0 or stages != 50
    ]
    found: dict[Cell, dict[str, Any]] = {}
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        by_file = {cell.file: cell for cell in cells}
        futures = {pool.submit(train, cell, given.out): file for file, cell in by_file.items()}
        for number, future in enumerate(as_completed(futures), start=1):
            curve = future.result()
            found |= {cell: curve for cell in cells if cell.file == futures[future]}
            print(f"{number}/{len(futures)} {futures[future]}: {curve['errors'][-1:]}", flush=True)
    text = "\n".join(table(found, given.stages)) + "\n"
    (given.out / "errors.md").write_text(text)
    for stages in given.stages:
        draw(found, stages, given.out / f"curves-{stages}.png")
    print(text)


if __name__ == "__main__":
    main()
