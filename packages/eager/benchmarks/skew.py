"""Severe imbalance: time, accuracy, staleness and active ranks on Fashion-MNIST and on sequences of many lengths.

    python packages/eager/benchmarks/skew.py [--jobs 2] [--out FOLDER] [--tasks fashion_mnist videos] [--epochs N]
        [--toy]

8 virtual ranks, 3 seeds. On Fashion-MNIST (a small CNN) every rank is delayed in every step, by 50 to 400 ms, shifted
by one rank after each step, and computes for 50 ms. The LSTM on sequences whose lengths are spread as the paper's
videos are needs no delays: a step takes as long as its longest sequence. Time passes on the virtual clock, so that
the machine's cores, and what else it does, do not show in it; it is that of the training without evaluations, on rank
0.

Each cell is a run of `hocket run` with a seed; see `training_runs`.

Source: eager-SGD (Li et al.), sec. 7.2.3 (ResNet-32, 8 processes skewed by 50 to 400 ms) and 7.3 (LSTM on UCF101).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "core-runtime" / "benchmarks"))
from training_runs import Run, file_name, run_all, spread

RANKS = 8
SEEDS = (0, 1, 2)
DRAWS = "gradients.0.collective.seed={seed}"

#: The rows: a recipe, and overrides in which {seed} stands for the run's.
METHODS: dict[str, tuple[str, ...]] = {
    "sgd": ("sgd",),
    "eager.solo": ("eager.solo", DRAWS),
    "eager.solo, sum": ("eager.solo", DRAWS, "gradients.0.collective.missed=sum"),
    "eager.majority": ("eager.majority", DRAWS),
    "eager.majority, sum": ("eager.majority", DRAWS, "gradients.0.collective.missed=sum"),
    "eager (last of 2)": ("eager", DRAWS),
    "eager, last of 4": ("eager", DRAWS, "gradients.0.collective.candidates=4"),
}

#: Baselines of other families, at more cost of time.
OTHERS: dict[str, tuple[str, ...]] = {name: (name,) for name in ("agd", "dpsgd", "sgp", "overlap_sgp")}

#: Overrides of each task; the batch is a rank's.
TASKS: dict[str, tuple[str, ...]] = {
    "fashion_mnist": (
        "task={name: fashion_mnist, network: cnn}",
        "delays={name: shifting_skew, shortest_s: 0.05, longest_s: 0.4}",
        "compute={step_s: 0.05}",
        "optimizer={name: sgd, lr: 0.05, momentum: 0.9}",
        "batch_size=32",
        "epochs=3",
    ),
    "videos": (
        "task={name: videos}",
        "compute={step_s: 0.01, element_s: 0.00001}",
        "optimizer={name: sgd, lr: 0.05, momentum: 0.9}",
        "batch_size=16",
        "epochs=6",
    ),
}
TOY: dict[str, tuple[str, ...]] = {
    "fashion_mnist": ("task={name: fashion_mnist, network: cnn, train_samples: 2048}", "epochs=1"),
    "videos": ("task={name: videos, train_samples: 512, valid_samples: 128}", "epochs=1"),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    method: str
    seed: int
    toy: bool = False
    epochs: int | None = None  # the task's own where None

    @property
    def folder(self) -> str:
        """The name of its folder."""
        epochs = "" if self.epochs is None else f"-{self.epochs}epochs"
        return f"{self.task}-{file_name(self.method)}-{self.seed}{epochs}"

    def command(self) -> list[str]:
        """Return the recipe and the run's settings, as `hocket run` takes them."""
        recipe, *overrides = {**METHODS, **OTHERS}[self.method]
        return [
            recipe,
            *(override.format(seed=self.seed) for override in overrides),
            *TASKS[self.task],
            *(TOY[self.task] if self.toy else ()),
            *(() if self.epochs is None else (f"epochs={self.epochs}",)),
            f"seed={self.seed}",
            f"ranks={RANKS}",
            "transport=virtual",
            "log_every=1000000",
        ]


def tables(found: dict[Cell, Run]) -> Iterator[str]:
    """Yield the lines of a table in markdown for each task."""
    for task in dict.fromkeys(cell.task for cell in found):
        of_task = {cell: run.summary for cell, run in found.items() if cell.task == task}
        yield f"{task}, {RANKS} ranks, mean and deviation over seeds:"
        yield ""
        yield "| strategy | time, s | times faster than sgd | accuracy, % | active ranks | staleness at most |"
        yield "|---|---:|---:|---:|---:|---:|"
        sgd = [summary["seconds"] for cell, summary in of_task.items() if cell.method == "sgd"]
        for method in dict.fromkeys(cell.method for cell in of_task):
            rows = [summary for cell, summary in of_task.items() if cell.method == method]
            seconds = [row["seconds"] for row in rows]
            faster = f"{statistics.mean(sgd) / statistics.mean(seconds):.2f}" if sgd else ""
            active = [row["active_mean"] for row in rows if row["active_mean"] is not None]
            yield (
                f"| {method} | {spread(seconds)} | {faster} "
                f"| {spread([100 * row['valid_accuracy'] for row in rows])} "
                f"| {f'{statistics.mean(active):.2f}' if active else ''} "
                f"| {max(row['staleness_max'] for row in rows)} |"
            )
        yield ""


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/eager-skew"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS, metavar="TASK")
    parser.add_argument(
        "--methods", nargs="*", default=list(METHODS), choices=[*METHODS, *OTHERS], metavar="METHOD"
    )
    parser.add_argument("--epochs", type=int, help="in place of the tasks' own")
    parser.add_argument("--toy", action="store_true", help="one seed and few samples: whether it works")
    given = parser.parse_args()
    cells = [
        Cell(task, method, seed, given.toy, given.epochs)
        for task in given.tasks
        for seed in (SEEDS[:1] if given.toy else SEEDS)
        for method in given.methods
    ]
    text = "\n".join(tables(run_all(cells, given.out, given.jobs)))
    (given.out / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
