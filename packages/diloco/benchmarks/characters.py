"""The cost of little communication: a character transformer, equal tokens, 4 ranks, the same seeds for every method.

    apt-get install bible-kjv-text
    python packages/diloco/benchmarks/characters.py --out runs/characters [--rows sgd "diloco 30"] [--seeds 0 1 2]
        [--jobs 2]

`characters.yaml` beside this file says what is trained, and the rows: one line each. Each run is a `hocket run` on
virtual ranks, on one core, with a folder of its own; the same command again leaves those that have ended as they are,
and goes on with those that were interrupted. `--rows` alone runs none, and prints the table of what there is.
Every run begins with the synchronous steps of `sgd`, as many as `synchronous` says: DiLoCo's paper trains so for 24,000
of 88,000 steps, and averages of replicas that start from scratch are poor.

The table at the end, in Markdown, has each row's mean loss on held-out text, in nats a character, and its difference
from another row's, in per cent: paired by seed, the mean and the 95 % interval by Student's t. A bound is met when the
interval reaches it; a row that is to be worse is so when all of the interval is above 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from scipy.stats import ttest_1samp

from hocket.checkpoint.folder import complete
from hocket.training.run import load_run, resolved

BENCHMARKS = Path(__file__).parent
TABLE = BENCHMARKS / "characters.yaml"

HEADERS = ("row", "seeds", "loss", "sent", "against", "difference, 95 % interval", "asked", "met")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: of the row.
        recipe: that its runs are of; empty where they are another row's.
        set: `KEY=VALUE` on top of it.
        of: the row whose runs it looks at; empty for its own.
        loss: the key of the run's summary; of a list the first rank's is meant.
        against: the row that it is compared with.
        within: the most that it may be worse, in per cent; None for no bound.
        worse: whether it has to be worse: a negative control.
        synchronous: whether it begins with the synchronous steps.
    """

    name: str
    recipe: str = ""
    set: Sequence[str] = ()
    of: str = ""
    loss: str = "valid_loss"
    against: str = ""
    within: float | None = None
    worse: bool = False
    synchronous: bool = True


@dataclass(frozen=True)
class Run:
    """A row's run with a seed, in a folder of its own."""

    row: Row
    seed: int
    folder: Path

    @property
    def summary(self) -> dict[str, Any] | None:
        """Return its result; None until it has ended."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def carry_out(self) -> None:
        """Train, unless it has been done.

        Raises:
            SystemExit: `hocket run` has failed; says how.
        """
        if self.summary is not None:
            return
        command = [sys.executable, "-m", "hocket"]
        if complete(self.folder / "checkpoints"):
            command += ["resume", str(self.folder)]
        else:
            self.folder.mkdir(exist_ok=True)
            file = self.folder / "run.yaml"
            file.write_text(yaml.safe_dump({**configured(self.row), "seed": self.seed}, sort_keys=False))
            command += ["run", str(file), "--out", str(self.folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.folder.name} failed: {done.stderr.strip()[-2000:]}")
        assert self.summary is not None
        print(f"{self.folder.name}: {self.summary['valid_loss']:.4f}", flush=True)


def read_rows(path: Path) -> dict[str, Row]:
    """Return the rows of a table, by name."""
    return {given["name"]: Row(**given) for given in yaml.safe_load(path.read_text())["rows"]}


def configured(row: Row) -> dict[str, Any]:
    """Return a row's run: the recipe's strategy from the first step on that is not synchronous."""
    table = yaml.safe_load(TABLE.read_text())
    first = table["synchronous_steps"] if row.synchronous else 0
    overrides = [*row.set, f"synchronous_steps={first}"]
    return {**resolved(load_run({**table["run"], "recipe": row.recipe}, overrides)), "name": row.recipe}


def run_of(row: Row, seed: int, out: Path) -> Run:
    return Run(row, seed, out / f"{row.name.replace(' ', '-')}-{seed}")


def losses(row: Row, rows: Mapping[str, Row], seeds: Sequence[int], out: Path) -> dict[int, float]:
    """Return the losses of those of a row's runs that have ended, by seed."""
    found = {}
    for seed in seeds:
        summary = run_of(rows[row.of] if row.of else row, seed, out).summary
        if summary is not None:
            value = summary[row.loss]
            found[seed] = float(value[0] if isinstance(value, list) else value)
    return found


def difference(own: Mapping[int, float], base: Mapping[int, float]) -> tuple[float, float, float] | None:
    """Return by how many per cent of the base's a row's losses differ, paired: mean, and the 95 % interval's ends."""
    paired = [100 * (own[seed] / base[seed] - 1) for seed in own if seed in base]
    if len(paired) < 2:
        return None
    interval = ttest_1samp(paired, 0.0).confidence_interval(0.95)
    return mean(paired), float(interval.low), float(interval.high)


def line(row: Row, rows: Mapping[str, Row], seeds: Sequence[int], out: Path) -> tuple[str, ...] | None:
    """Return a row's cells; None where none of its runs has ended."""
    own = losses(row, rows, seeds, out)
    if not own:
        return None
    ended = [run_of(rows[row.of] if row.of else row, seed, out).summary for seed in own]
    sent = mean(each["bytes_sent_per_step"] * each["steps"] for each in ended if each is not None)
    cells = [row.name, str(len(own)), f"{mean(own.values()):.4f}", f"{sent / 1e6:,.1f} MB", row.against]
    found = difference(own, losses(rows[row.against], rows, seeds, out)) if row.against else None
    if found is None:
        return (*cells, "", "", "")
    middle, low, high = found
    asked = f"within {row.within:g} %" if row.within is not None else "worse" if row.worse else ""
    met = low > 0 if row.worse else row.within is not None and low <= row.within
    told = f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})"
    return (*cells, told, asked, ("yes" if met else "no") if asked else "")


def table(rows: Mapping[str, Row], seeds: Sequence[int], out: Path) -> str:
    """Return the results so far as Markdown."""
    lines = [HEADERS, ("---",) * len(HEADERS)]
    lines += [cells for row in rows.values() if (cells := line(row, rows, seeds, out)) is not None]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = read_rows(TABLE)
    trained = [name for name, row in rows.items() if not row.of]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--rows", nargs="*", default=trained, choices=trained, help="those to run; all by default"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    runs = [run_of(rows[name], seed, out) for seed, name in product(options.seeds, options.rows)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(run.carry_out) for run in runs]:
            done.result()
    text = table(rows, options.seeds, out)
    (out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
