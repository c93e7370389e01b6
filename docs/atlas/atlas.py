"""Train two tasks with every recipe that makes sense on 8 virtual ranks, and draw what each sends, takes and reaches.

    apt-get install bible-kjv-text dataset-fashion-mnist
    python docs/atlas/atlas.py --out runs/atlas [--seeds 0 1 2] [--jobs 2]
    python docs/atlas/atlas.py --draw            # from results.json alone

`atlas.yaml` beside this file says what is trained. Runs are those of `hocket sweep`, a folder each: the same command
again leaves those that have ended as they are. Afterwards results.json, README.md and the pictures beside this file say
what all ended runs in the folder gave, besides what results.json held before: remove it to begin anew. Numbers of three
seeds take some two hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypedDict

import yaml

from hocket.cli.checking import check_run
from hocket.training.run import load_run

HERE = Path(__file__).parent
ATLAS: dict[str, Any] = yaml.safe_load((HERE / "atlas.yaml").read_text())
RESULTS = HERE / "results.json"
#: Steps of the runs that only show how long a step takes: each exchange of all recipes happens in them, several times.
TIMED_STEPS = 120


class Result(TypedDict):
    """What the runs of a strategy gave.

    Attributes:
        values: the task's metric at the end, by seed.
        megabytes: that a rank sent, in all steps.
        step_s: seconds a step, by network.
    """

    values: dict[str, float]
    megabytes: float
    step_s: dict[str, float]


Results = dict[str, dict[str, Result]]  # by task and strategy


def run_file(task: str, out: Path, network: str = ATLAS["trained_on"], **changes: Any) -> Path:
    """Write the file of a task's run, whose links are slow in proportion to its model."""
    settings = {
        "recipe": "sgd",
        "transport": "virtual",
        "ranks": ATLAS["ranks"],
        "device": "cpu",
        "compute": {"step_s": ATLAS["compute_s"]},
        **ATLAS["tasks"][task]["run"],
        **changes,
    }
    model = check_run(load_run(settings)).model()
    share = sum(parameter.numel() for parameter in model.parameters()) / ATLAS["parameters"]
    rate = share * ATLAS["networks"][network]
    settings["network"] = {"latency_s": ATLAS["latency_s"], "bandwidth_bits_per_s": rate}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "run.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def sweep(file: Path, group: Mapping[str, Any], jobs: int, out: Path) -> None:
    """Carry out the runs of a group's strategies.

    Raises:
        CalledProcessError: some have failed; `hocket sweep` has said which.
    """
    command = [
        sys.executable,
        "-m",
        "hocket",
        "sweep",
        str(file),
        f"strategy={','.join(group['strategies'])}",
    ]
    command += [*group.get("set", ()), "--jobs", str(jobs), "--out", str(out)]
    subprocess.run(command, check=True)


def train(seeds: Sequence[int], jobs: int, out: Path) -> None:
    """Carry out all runs: of each seed all strategies, then how long their steps take on the other networks."""
    for seed in seeds:
        for task, told in ATLAS["tasks"].items():
            for place, group in enumerate(told["groups"]):
                folder = out / task / f"seed-{seed}"
                sweep(run_file(task, folder / str(place), seed=seed), group, jobs, folder / str(place))
    for network in ATLAS["networks"]:
        for task, told in ATLAS["tasks"].items():
            for place, group in enumerate(told["groups"]):
                folder = out / task / folder_of(network) / str(place)
                file = run_file(task, folder, network, steps=TIMED_STEPS, batch_size=1, schedulers=[])
                sweep(file, group, jobs, folder)


def folder_of(network: str) -> str:
    """Return the name of the folder for a network's runs."""
    return network.replace(" ", "-").replace("/", "-")


def summaries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the summaries of the runs in a folder that have ended, by strategy."""
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*/*/summary.json")))
    return {summary["recipe"]: summary for summary in found}


def collect(out: Path, results: Results) -> Results:
    """Return `results` with what the ended runs in a folder gave; other seeds and networks stay as they are."""
    for task, told in ATLAS["tasks"].items():
        found = results.setdefault(task, {})
        for folder in sorted(out.glob(f"{task}/seed-*")):
            for name, summary in summaries(folder).items():
                result = found.setdefault(name, Result(values={}, megabytes=0.0, step_s={}))
                result["values"][folder.name.removeprefix("seed-")] = summary[told["metric"]]
                result["megabytes"] = summary["bytes_sent_per_step"] * summary["steps"] / 1e6
        for network in ATLAS["networks"]:
            timed = summaries(out / task / folder_of(network))
            for name in found.keys() & timed.keys():
                found[name]["step_s"][network] = timed[name]["seconds"] / timed[name]["steps"]
    return results


def spread(result: Result) -> float:
    """Return the standard deviation over the seeds; 0 of one."""
    values = list(result["values"].values())
    return stdev(values) if len(values) > 1 else 0.0


def draw(results: Results) -> None:
    """Write a picture for each task: what its strategies reach over what a rank sends, and over time by network."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    for task, found in results.items():
        told = ATLAS["tasks"][task]
        figure, panels = plt.subplots(2, 2, figsize=(13, 10), sharey=True, layout="constrained")
        sent = {name: {"x": max(result["megabytes"], 0.01)} for name, result in found.items()}
        plots: list[tuple[str, dict[str, dict[str, float]]]] = [("megabytes that a rank sends", sent)]
        for network in ATLAS["networks"]:
            steps = told["run"]["steps"]
            timed = {
                name: {"x": steps * result["step_s"][network]}
                for name, result in found.items()
                if network in result["step_s"]
            }
            plots.append((f"seconds, {network}", timed))
        for axes, (label, points) in zip(panels.flat, plots, strict=True):
            places = {
                name: (x["x"], mean(list(found[name]["values"].values()))) for name, x in points.items()
            }
            for name, (x, y) in places.items():
                axes.errorbar(x, y, yerr=spread(found[name]), fmt="o", markersize=4, color=colour(name))
            for names in close_together(places):
                axes.annotate(
                    ",\n".join(names),
                    places[names[0]],
                    xytext=(5, -2),
                    textcoords="offset points",
                    fontsize=7,
                    va="top",
                )
            axes.set_xscale("log")
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        for axes in panels[:, 0]:
            axes.set_ylabel(told["label"])
        if told["metric"].endswith("loss"):
            panels[0, 0].invert_yaxis()  # shared: up is better on all
        figure.savefig(HERE / f"{task}.png", dpi=110)
        plt.close(figure)


def close_together(places: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    """Return names in groups that one label is for: a point of a group is close to its first, on a logarithmic x."""
    if not places:
        return []
    across = {name: math.log(x) for name, (x, _) in places.items()}
    up = {name: y for name, (_, y) in places.items()}
    wide, high = (max(each.values()) - min(each.values()) or 1.0 for each in (across, up))
    groups: list[list[str]] = []
    for name in sorted(places, key=lambda each: (-up[each], across[each])):
        for group in groups:
            first = group[0]
            if abs(across[name] - across[first]) < 0.08 * wide and abs(up[name] - up[first]) < 0.03 * high:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def colour(name: str) -> str:
    """Return a colour for the package that a recipe is of."""
    packages = {
        "": "#333333",
        "diloco": "#2f6db5",
        "eager": "#d98c5f",
        "redsync": "#4a9c5d",
        "crossover": "#8a5aa8",
    }
    return packages.get(name.partition(".")[0], "#b03a48" if name == "gossipgrad" else packages[""])


def page(results: Results) -> str:
    """Return the page that tells all of it, in Markdown."""
    lines = [(HERE / "head.md").read_text().rstrip()]
    for task, found in results.items():
        told = ATLAS["tasks"][task]
        networks = list(ATLAS["networks"])
        lines += [
            "",
            f"## {task}",
            "",
            f"![{task}: {told['label']} over megabytes and seconds]({task}.png)",
            "",
        ]
        head = [
            "strategy",
            told["label"],
            "seeds",
            "MB a rank sends",
            *(f"ms a step, {each}" for each in networks),
        ]
        lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
        falling = told["metric"].endswith("loss")
        for name, result in sorted(
            found.items(), key=lambda item: mean(item[1]["values"].values()), reverse=not falling
        ):
            reached = f"{mean(result['values'].values()):.4f}"
            if len(result["values"]) > 1:
                reached += f" ± {spread(result):.4f}"
            times = [
                f"{1000 * result['step_s'][each]:,.0f}" if each in result["step_s"] else ""
                for each in networks
            ]
            cells = [f"`{name}`", reached, str(len(result["values"])), f"{result['megabytes']:,.1f}", *times]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the runs' folder")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: times alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="train nothing; without --out draw results.json")
    options = parser.parse_args()
    if options.out is None and not options.draw:
        parser.error("--out is missing: the folder for the runs")
    if not options.draw:
        train(options.seeds, options.jobs, options.out.resolve())
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.out is not None:
        results = collect(options.out.resolve(), results)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    draw(results)
    (HERE / "README.md").write_text(page(results))


if __name__ == "__main__":
    main()
