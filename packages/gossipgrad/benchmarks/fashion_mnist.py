"""Validation accuracy of GossipGraD and what it is compared with, on Fashion-MNIST.

    python packages/gossipgrad/benchmarks/fashion_mnist.py [--jobs 2] [--out FOLDER] [--toy]

8, 16 and 32 virtual ranks train a small CNN with 32 samples per rank and step: weak scaling, equal epochs, and so the
fewer steps the more ranks there are. All methods have the learning rate of a single device, as the paper gives to
GossipGraD; `agd` has a second row with sqrt(ranks) times that, as the paper gives to AGD. Each cell is a run of `hocket
run` with a seed; see `training_runs`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "core-runtime" / "benchmarks"))
from training_runs import Run, file_name, run_all, spread

RANKS = (8, 16, 32)
SEEDS = (0, 1, 2)
SAMPLES = 60_000
EPOCHS = 4
BATCH = 32
LEARNING_RATE = 0.02

ROTATION = "parameters.0.topology.seed={seed}"

#: The rows: a recipe, the learning rate as a function of ranks, and overrides in which {seed} stands for the run's.
METHODS: dict[str, tuple[str, Callable[[int], float], tuple[str, ...]]] = {
    "sgd": ("sgd", lambda ranks: LEARNING_RATE, ()),
    "agd": ("agd", lambda ranks: LEARNING_RATE, ()),
    "agd, sqrt(p) times the rate": ("agd", lambda ranks: LEARNING_RATE * ranks**0.5, ()),
    "gossipgrad": ("gossipgrad", lambda ranks: LEARNING_RATE, (ROTATION,)),
    "gossipgrad, one step late": (
        "gossipgrad",
        lambda ranks: LEARNING_RATE,
        (ROTATION, "parameters.0={overlap: none, delay: 1}"),
    ),
    "gossipgrad, samples drawn anew": ("gossipgrad", lambda ranks: LEARNING_RATE, (ROTATION, "samples=null")),
    "gossipgrad.gradients": (
        "gossipgrad.gradients",
        lambda ranks: LEARNING_RATE,
        (ROTATION.replace("parameters", "gradients"),),
    ),
    "gossipgrad.agd_every_log": ("gossipgrad.agd_every_log", lambda ranks: LEARNING_RATE, ()),
    "gossipgrad.random": ("gossipgrad.random", lambda ranks: LEARNING_RATE, (ROTATION,)),
    "local": ("local", lambda ranks: LEARNING_RATE, ()),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    ranks: int
    seed: int
    samples: int = SAMPLES
    epochs: int = EPOCHS

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{file_name(self.method)}-{self.ranks}-{self.seed}"

    def command(self) -> list[str]:
        """Return the recipe and the run's settings, as `hocket run` takes them."""
        recipe, rate, overrides = METHODS[self.method]
        return [
            recipe,
            *(override.format(seed=self.seed) for override in overrides),
            f"task={{name: fashion_mnist, network: cnn, train_samples: {self.samples}}}",
            f"optimizer={{name: sgd, lr: {rate(self.ranks)}, momentum: 0.9}}",
            f"batch_size={BATCH}",
            f"epochs={self.epochs}",
            f"seed={self.seed}",
            f"ranks={self.ranks}",
            "transport=virtual",
            "log_every=1000000",
        ]


@dataclass(frozen=True)
class Found:
    """The results of a run.

    Attributes:
        consensus: accuracy of the replicas' mean, in per cent.
        replicas: accuracy of each replica, in per cent.
        distances: the replicas' root mean square distance from their mean, after each epoch.
    """

    consensus: float
    replicas: list[float]
    distances: list[float]


def read(run: Run) -> Found:
    """Read a run's results."""
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return Found(
        run.accuracy,
        [100 * accuracy for accuracy in run.summary["valid_accuracy_ranks"]],
        [row["consensus_distance"] for row in rows if "consensus_distance" in row],
    )


def tables(found: dict[Cell, Found]) -> Iterator[str]:
    """Yield the lines of three tables in markdown, each with a column for each number of ranks."""
    ranks = sorted({cell.ranks for cell in found})
    contents: dict[str, Callable[[list[Found]], str]] = {
        "Accuracy of the replicas' mean, in per cent, mean and deviation over seeds": lambda of: spread(
            [one.consensus for one in of]
        ),
        "Accuracy of single replicas, in per cent: mean, lowest and highest": lambda of: (
            "{:.2f} ({:.2f} to {:.2f})".format(*_range([a for one in of for a in one.replicas]))
        ),
        "Replicas' distance from their mean after each epoch, mean over seeds": lambda of: ", ".join(
            f"{statistics.mean(values):.3g}" for values in zip(*(one.distances for one in of), strict=True)
        ),
    }
    for title, content in contents.items():
        yield f"{title}:"
        yield ""
        yield "| method | " + " | ".join(f"{count} ranks" for count in ranks) + " |"
        yield "|---|" + "---:|" * len(ranks)
        for method in dict.fromkeys(cell.method for cell in found):
            columns = (
                content([v for cell, v in found.items() if (cell.method, cell.ranks) == (method, count)])
                for count in ranks
            )
            yield f"| {method} | " + " | ".join(columns) + " |"
        yield ""


def _range(values: list[float]) -> tuple[float, float, float]:
    return statistics.mean(values), min(values), max(values)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gossipgrad-fashion-mnist"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument(
        "--toy", action="store_true", help="one seed, few ranks and samples: whether it works"
    )
    given = parser.parse_args()
    cells = [
        Cell(method, ranks, seed, *((1024, 2) if given.toy else ()))
        for seed in (SEEDS[:1] if given.toy else SEEDS)
        for ranks in (RANKS[:1] if given.toy else RANKS)
        for method in given.methods
    ]
    found = {cell: read(run) for cell, run in run_all(cells, given.out, given.jobs).items()}
    text = "\n".join(tables(found))
    (given.out / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
