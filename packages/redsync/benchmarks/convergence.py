"""The accuracy that compression costs: Fashion-MNIST (CNN, MLP) and a language model, dense against RedSync.

    apt-get install dataset-fashion-mnist bible-kjv-text
    python packages/redsync/benchmarks/convergence.py --out runs/fashion --problems cnn mlp [--ranks 4 8] [--seeds 3]
    python packages/redsync/benchmarks/convergence.py --out runs/bible --problems lstm --ranks 4 [--bible FILE]
        [--methods ...] [--steps N] [--jobs 1]
    python packages/redsync/benchmarks/convergence.py --out runs/fashion --problems cnn --ranks 8
        --methods sgd redsync hierarchical "hierarchical, redsync"
    python packages/redsync/benchmarks/convergence.py --out runs/fashion --problems cnn mlp --ranks 8 16
        --methods sgd redsync scalable

Each cell is a `hocket run` on virtual ranks, half a minute to two minutes on one core; a cell whose `summary.json` is
there is not run again. The table at the end, in Markdown, has each method's mean and its difference from `sgd`: points
of accuracy, or per cent of perplexity. The first tenth of the steps is dense, as in the paper, for every method.

An element waits until it is large: at a density of 0.1 %, for hundreds of steps. What a run of a few hundred steps has
not sent when it ends is missing from its result, so the gap to `sgd` falls as runs become longer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

BENCHMARKS = Path(__file__).parent
CLIP = 1.0

PROBLEMS = {
    "cnn": ["task={name: fashion_mnist, network: cnn}", "optimizer.lr=0.05", "batch_size=32"],
    "mlp": ["task={name: fashion_mnist, network: mlp, hidden: 512}", "optimizer.lr=0.05", "batch_size=32"],
    "lstm": [
        "task={name: 'bible:Bible', path: BIBLE, hidden: 128, length: 32}",
        "optimizer={name: sgd, lr: 4.0, momentum: 0.0}",
        "batch_size=16",
    ],
}

#: How long each is trained.
STEPS = {"cnn": 500, "mlp": 500, "lstm": 4000}

FLAT, SCALABLE, HIERARCHICAL = "redsync", "redsync.scalable", "redsync.hierarchical_crossover"
_HYBRID = "{name: redsync.hybrid, density: 0.001, sampled_from_kb: 1024}"

#: The recipe of each method, and what it sends once it begins to compress; None for all.
METHODS: dict[str, tuple[str, str | None]] = {
    "sgd": (FLAT, None),
    "exact": (FLAT, "{name: redsync.exact, density: 0.001, dense_below_kb: 0}"),
    "redsync": (FLAT, _HYBRID),
    "scalable": (SCALABLE, _HYBRID),
    "redsync, unmasked": (FLAT, _HYBRID[:-1] + ", masking: false}"),
    "asq": (FLAT, "{name: redsync.asq, density: 0.001}"),
    "asq, error kept": (FLAT, "{name: redsync.asq, density: 0.001, feedback: error}"),
    "hierarchical": (HIERARCHICAL, None),
    "hierarchical, redsync": (HIERARCHICAL, _HYBRID),
}

#: Whose gradients are exchanged: everybody's, or those of groups of four, whose leaders gossip.
SCOPES = {FLAT: "world", SCALABLE: "world", HIERARCHICAL: "{name: group, size: 4, count: null, by: null}"}

DEFAULT_METHODS = ["sgd", "redsync", "asq"]


@dataclass(frozen=True)
class Cell:
    """One run."""

    problem: str
    method: str
    ranks: int
    seed: int

    @property
    def name(self) -> str:
        method = self.method.replace(", ", "_").replace(" ", "_")
        return f"{self.problem}-{method}-{self.ranks}-{self.seed}"

    def command(self, out: Path, steps: int, bible: Path) -> list[str]:
        """Return the run's command line."""
        warm_up = steps // 10
        recipe, compressor = METHODS[self.method]
        over, clips = SCOPES[recipe], self.problem == "lstm"
        dense = exchange("allreduce", over, "none", clips)
        sparse = dense
        if compressor is not None:
            algorithm = "scalable" if recipe == SCALABLE else "gather"
            collective = f"{{name: redsync.allreduce, auto: false, algorithm: {algorithm}}}"
            sparse = exchange(collective, over, compressor, clips)
        settings = [
            *(setting.replace("BIBLE", str(bible.resolve())) for setting in PROBLEMS[self.problem]),
            f"strategy.gradients={dense if warm_up else sparse}",
            f"steps={steps}",
            f"seed={self.seed}",
            "transport=virtual",
            f"schedulers=[{{name: cosineannealinglr, T_max: {steps}}}]",
        ]
        if warm_up and compressor:
            settings.append(f"phases={{{warm_up}: {{gradients: {sparse}}}}}")
        launch = [sys.executable, "-m", "hocket", "run", recipe]
        return [*launch, *settings, "-n", str(self.ranks), "--out", str(out)]


def exchange(collective: str, over: str, compressor: str, clips: bool) -> str:
    """Return the gradients slot of a strategy."""
    if clips:
        compressor = f"{{name: local_clipping, max_norm: {CLIP}, compressor: {compressor}}}"
    return f"[{{collective: {collective}, over: {over}, segments: bytes, compressor: {compressor}}}]"


def run(cell: Cell, folder: Path, steps: int, bible: Path) -> None:
    """Run a cell, unless it was."""
    out = folder / cell.name
    if (out / "summary.json").exists():
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARKS)}
    command = cell.command(out.resolve(), steps, bible)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{cell.name} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    print(f"{cell.name}: {(out / 'summary.json').read_text()[:300]}", flush=True)


def figure(folder: Path, cell: Cell) -> tuple[float, float]:
    """Return a cell's accuracy in per cent, or its perplexity, and the bytes that a rank sent in a step."""
    summary = json.loads((folder / cell.name / "summary.json").read_text())
    sent = float(summary["bytes_sent_per_step"])
    if cell.problem == "lstm":
        return math.exp(summary["valid_loss"]), sent
    return 100 * summary["valid_accuracy"], sent


def table(folder: Path, problems: list[str], methods: list[str], ranks: list[int], seeds: int) -> str:
    """Return the results as Markdown."""
    lines = [
        "| problem | ranks | method | result | against sgd | sent per step |",
        "|---|---|---|---|---|---|",
    ]
    for problem, size in product(problems, ranks):
        results = {
            method: [figure(folder, Cell(problem, method, size, seed)) for seed in range(seeds)]
            for method in methods
        }
        for method, figures in results.items():
            own = mean(value for value, _ in figures)
            spread = max(value for value, _ in figures) - min(value for value, _ in figures)
            unit = "%" if problem != "lstm" else "perplexity"
            against = ""
            if "sgd" in results:
                base = mean(value for value, _ in results["sgd"])
                against = (
                    f"{100 * (own / base - 1):+.2f} %" if problem == "lstm" else f"{own - base:+.2f} points"
                )
            sent = mean(nbytes for _, nbytes in figures)
            lines.append(
                f"| {problem} | {size} | {method} | {own:.2f} {unit} (range {spread:.2f}) | {against} | {sent:,.0f} B |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=DEFAULT_METHODS, choices=list(METHODS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of each problem's own")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--bible", type=Path, default=Path("/usr/lib/bible.data"), help="bible-kjv-text's file"
    )
    options = parser.parse_args()
    cells = [
        Cell(problem, method, ranks, seed)
        for seed, problem, ranks, method in product(
            range(options.seeds), options.problems, options.ranks, options.methods
        )
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(run, cell, options.out, options.steps or STEPS[cell.problem], options.bible)
            for cell in cells
        ]
        for each in runs:
            each.result()
    result = table(options.out, options.problems, options.methods, options.ranks, options.seeds)
    (options.out / "table.md").write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
