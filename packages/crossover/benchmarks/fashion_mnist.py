"""Validation accuracy of Crossover-SGD, its ablations and what it is compared with, on Fashion-MNIST.

    python packages/crossover/benchmarks/fashion_mnist.py [--jobs 2] [--out FOLDER] [--rates | --toy]

16 virtual ranks train a small CNN with LARS, coefficient and momentum as in the paper, a linear warm-up over 40 % of
the steps as there, then a cosine to zero, and label smoothing 0.1. Each cell of the table is a run of `hocket run` with
a seed; see `training_runs`. All cells of a column differ in their strategy alone. The accuracy is that of the replicas'
mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "core-runtime" / "benchmarks"))
from training_runs import Run, file_name, run_all, spread

RANKS = 16
SEEDS = (0, 1, 2)
SAMPLES = 60_000
EPOCHS = 5
WARM_UP_FRACTION = 36 / 90

#: Global batches and their learning rates for all methods; `--rates` shows how sgd does with each of RATES.
LEARNING_RATES = {512: 2.0, 8192: 2.0}
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
RATE_SEED = 100

GROUPS = "gradients.0.over.size=null"

#: The rows of the table: a recipe, and overrides in which {seed} stands for the run's.
METHODS: dict[str, tuple[str, ...]] = {
    "sgd": ("sgd",),
    "sgp": ("sgp", "parameters.0.segments=model"),
    "crossover": ("crossover", "parameters.0.topology.seed={seed}"),
    "without fairness": ("crossover.unfair", "parameters.0.topology.seed={seed}"),
    "without segments": ("crossover.whole_model", "parameters.0.topology.seed={seed}"),
    "hierarchical, 2 groups": ("crossover.hierarchical", GROUPS, "gradients.0.over.count=2"),
    "hierarchical, 4 groups": ("crossover.hierarchical", GROUPS, "gradients.0.over.count=4"),
    "hierarchical, 8 groups": ("crossover.hierarchical", GROUPS, "gradients.0.over.count=8"),
}


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    method: str
    batch: int
    rate: float
    seed: int
    samples: int = SAMPLES
    epochs: int = EPOCHS

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{file_name(self.method)}-{self.batch}-{self.rate:g}-{self.seed}"

    def command(self) -> list[str]:
        """Return the recipe and the run's settings, as `hocket run` takes them."""
        steps = self.epochs * -(-self.samples // self.batch)
        warm_up = max(1, round(WARM_UP_FRACTION * steps))
        lars = f"lr: {self.rate}, momentum: 0.96, weight_decay: 5e-5, coefficient: 0.0025"
        return [
            *(word.format(seed=self.seed) for word in METHODS[self.method]),
            f"task={{name: fashion_mnist, network: cnn, label_smoothing: 0.1, train_samples: {self.samples}}}",
            f"optimizer={{name: hocket_crossover:LARS, {lars}}}",
            f"schedulers=[{{name: linearlr, start_factor: {1 / warm_up}, total_iters: {warm_up}}}, "
            f"{{name: cosineannealinglr, T_max: {steps}}}]",
            f"batch_size={self.batch // RANKS}",
            f"epochs={self.epochs}",
            f"seed={self.seed}",
            f"ranks={RANKS}",
            "transport=virtual",
            "log_every=1000000",
        ]


def table(found: dict[Cell, Run], rows: Sequence[object], row_of: str) -> Iterator[str]:
    """Yield the lines of a table in markdown: mean and deviation over seeds, a column for each global batch.

    Args:
        found: the runs.
        rows: what the rows stand for, the values of the cells' field `row_of`.
    """
    batches = sorted({cell.batch for cell in found})
    yield f"| {row_of} | " + " | ".join(f"global batch {batch}" for batch in batches) + " |"
    yield "|---|" + "---:|" * len(batches)
    for row in rows:
        columns = []
        for batch in batches:
            of_cell = [
                run for cell, run in found.items() if (getattr(cell, row_of), cell.batch) == (row, batch)
            ]
            columns.append(spread([run.accuracy for run in of_cell]))
        yield f"| {row} | " + " | ".join(columns) + " |"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/crossover-fashion-mnist"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument(
        "--rates", action="store_true", help="sgd with each learning rate, instead of the table"
    )
    parser.add_argument("--toy", action="store_true", help="one seed, few samples: whether it works")
    given = parser.parse_args()
    rows: Sequence[object]
    if given.rates:
        cells = [Cell("sgd", batch, rate, RATE_SEED) for batch in LEARNING_RATES for rate in RATES]
        rows, row_of = RATES, "rate"
    else:
        seeds, size = (SEEDS[:1], {"samples": 1024, "epochs": 2}) if given.toy else (SEEDS, {})
        cells = [
            Cell(method, batch, rate, seed, **size)
            for seed in seeds
            for batch, rate in LEARNING_RATES.items()
            for method in METHODS
            if batch == 512 or not given.toy
        ]
        rows, row_of = list(METHODS), "method"
    text = "\n".join(table(run_all(cells, given.out, given.jobs), rows, row_of)) + "\n"
    (given.out / f"{row_of}s.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
