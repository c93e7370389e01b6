"""A small GPT-2 on four hosts with slow links: DDP against strategies of Hocket, at equal steps and at equal time.

    sudo .venv/bin/python packages/transformers/benchmarks/slow_network.py --out runs/slow

The hosts are those of `tools/netlab`, with a rank each. For each rate of the links
`hocket sweep --script train_gpt2.py` trains with each strategy and seed, `hocket launch` with DistributedDataParallel.
The same command again leaves runs that have ended as they are. At the end a table in Markdown, `table.md`: the loss on
held-out text, in nats a byte, after the same number of steps, and after the seconds that the fastest strategy took for
them, interpolated between evaluations; means and standard deviations over the seeds. The learning rate is constant
after its warm-up, so that a run that is stopped early is none the worse for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("train_gpt2.py")
HOSTS = "host0:1,host1:1,host2:1,host3:1"
DDP = "DDP"
HEADERS = ("links", "strategy", "loss at equal steps", "seconds", "a rank sent", "loss at equal time")


def strategies(steps: int) -> list[str]:
    """Return the strategies to compare: DiLoCo with a quarter of the steps synchronous."""
    return ["agd", "powersgd", f"diloco parameters.0.every={steps // 12} synchronous_steps={steps // 4}"]


def on_hosts(rate: str, *words: str) -> None:
    """Carry out a command of Hocket's on the first of four hosts.

    Raises:
        SystemExit: it has failed.
    """
    netlab = [sys.executable, str(ROOT / "tools/netlab"), "--hosts", "4", "--rate", rate]
    command = [*netlab, "exec", "0", "--", sys.executable, "-m", "hocket", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def carry_out(rate: str, folder: Path, steps: int, seeds: Sequence[int]) -> None:
    """Train with each strategy and seed, unless that has been done."""
    ranks = ["--hosts", HOSTS, "--transport", "torch"]
    listed = ",".join(map(str, seeds))
    chosen = [f"strategy={','.join(strategies(steps))}", f"seed={listed}", f"steps={steps}"]
    on_hosts(rate, "sweep", "--script", str(SCRIPT), *chosen, *ranks, "--out", str(folder / "hocket"))
    for seed in seeds:
        rows = folder / f"ddp-{seed}"
        if not (rows / "ended").exists():
            arguments = ["--ddp", str(rows), "--seed", str(seed), "--steps", str(steps)]
            on_hosts(rate, "launch", *ranks, str(SCRIPT), *arguments)
            (rows / "ended").touch()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return a run's rows with a loss on held-out text."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_loss" in row]


def runs(folder: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the rows of all runs with the same links, by strategy."""
    found = {DDP: [read_rows(each) for each in sorted(folder.glob("ddp-*"))]}
    for config in sorted(folder.glob("hocket/*/config.yaml")):
        name = yaml.safe_load(config.read_text())["name"]
        found.setdefault(name, []).append(read_rows(config.parent))
    return found


def loss_after(rows: Sequence[dict[str, Any]], seconds: float) -> float:
    """Return the loss after some seconds, interpolated between evaluations."""
    times, losses = [row["seconds"] for row in rows], [row["eval_loss"] for row in rows]
    place = min(max(1, bisect_left(times, seconds)), len(times) - 1)
    share = (seconds - times[place - 1]) / (times[place] - times[place - 1])
    return float(losses[place - 1] + min(1.0, share) * (losses[place] - losses[place - 1]))


def spread(values: Sequence[float], digits: int = 3) -> str:
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


def table(out: Path, rates: Sequence[str]) -> str:
    """Return the results as Markdown."""
    lines = [HEADERS, ("---", "---", *["---:"] * 4)]
    for rate in rates:
        found = runs(out / rate)
        fastest = min(mean(rows[-1]["seconds"] for rows in each) for each in found.values())
        for name, each in found.items():
            sent = [rows[-1]["bytes_sent"] / 1e6 for rows in each if "bytes_sent" in rows[-1]]
            lines.append(
                (
                    f"{rate.removesuffix('mbit')} Mbit/s",
                    name,
                    spread([rows[-1]["eval_loss"] for rows in each]),
                    spread([rows[-1]["seconds"] for rows in each], 1),
                    f"{mean(sent):.1f} MB" if sent else "",
                    spread([loss_after(rows, fastest) for rows in each]),
                )
            )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    out = options.out.resolve()
    for rate in options.rates:
        carry_out(rate, out / rate, options.steps, options.seeds)
    text = table(out, options.rates)
    (out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
