"""One rank that is four times slower: staleness, accuracy and simulated time on Fashion-MNIST.

    python packages/adpsgd/benchmarks/one_late_rank.py [--jobs 2] [--out FOLDER] [--methods adpsgd sgd]
        [--seeds 0 1 2] [--steps N]

16 virtual ranks compute for 50 ms a step, the last of them for 200 ms. Each rank does the same number of steps on its
own share of the samples, with batches of 8. Time passes on the virtual clock, so that the machine's cores, and what
else it does, do not show in it. Accuracy is of the replicas' mean when the late rank has done its steps, too.

Each row's cells are runs of `hocket run`, one for each seed; see `training_runs`. Needs hocket-tasks, hocket-eager,
hocket-crossover and the data of Fashion-MNIST.

Source: X. Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, on one slower
worker among many.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "core-runtime" / "benchmarks"))
from training_runs import Run, run_all, spread

RANKS = 16
#: What a step computes, and by how much the last rank's takes longer.
STEP_S, LATE_S = 0.05, 0.15
SEEDS = (0, 1, 2)

_DRAWN, _SUM = "gradients.0.collective.seed={seed}", "gradients.0.collective.missed=sum"
#: The rows: a recipe, and overrides in which {seed} stands for the run's.
METHODS: dict[str, tuple[str, ...]] = {
    "sgd": ("sgd",),
    "dpsgd": ("dpsgd",),
    "crossover": ("crossover", "parameters.0.topology.seed={seed}"),
    "adpsgd": ("adpsgd", "parameters.0.collective.seed={seed}"),
    "eager.majority": ("eager.majority", _DRAWN),
    "eager.solo": ("eager.solo", _DRAWN),
    "eager.majority, sum": ("eager.majority", _DRAWN, _SUM),
    "eager.solo, sum": ("eager.solo", _DRAWN, _SUM),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    seed: int
    steps: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.method.replace(', ', '-')}-{self.steps}steps-{self.seed}"

    def command(self) -> list[str]:
        """Return the recipe and the run's settings, as `hocket run` takes them."""
        return [
            *(word.format(seed=self.seed) for word in METHODS[self.method]),
            "task={name: fashion_mnist, network: cnn}",
            f"delays={{name: fixed, ranks: [{RANKS - 1}], seconds: {LATE_S}}}",
            f"compute={{step_s: {STEP_S}}}",
            "optimizer={name: sgd, lr: 0.02, momentum: 0.9}",
            "batch_size=8",
            "epochs=1",
            f"steps={self.steps}",
            f"seed={self.seed}",
            f"ranks={RANKS}",
            "transport=virtual",
            "log_every=1000000",
        ]


def table(found: dict[Cell, Run]) -> Iterator[str]:
    """Yield the lines of a table in markdown."""
    yield "| strategy | rank 0 trains, s | the late rank, s | accuracy, % | ranks in a result | staleness at most |"
    yield "|---|---:|---:|---:|---:|---:|"
    for method in dict.fromkeys(cell.method for cell in found):
        runs = [run for cell, run in found.items() if cell.method == method]
        rows = [run.summary for run in runs]
        active = [row["active_mean"] for row in rows if row["active_mean"] is not None]
        yield (
            f"| {method} | {spread([_seconds_of_others(run) for run in runs])} "
            f"| {spread([row['seconds'] for row in rows])} | {spread([run.accuracy for run in runs])} "
            f"| {f'{statistics.mean(active):.2f}' if active else ''} "
            f"| {max(row['staleness_max'] for row in rows)} |"
        )


def _seconds_of_others(run: Run) -> float:
    """Return what rank 0 has computed and waited; the summary's seconds are the slowest rank's."""
    row = run.summary
    return float(row["steps"] * STEP_S + row["exposed_wait_fraction_ranks"][0] * row["seconds"])


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/one-late-rank"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    cells = [Cell(method, seed, given.steps) for seed in given.seeds for method in given.methods]
    found = run_all(cells, given.out, given.jobs)
    print()
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
