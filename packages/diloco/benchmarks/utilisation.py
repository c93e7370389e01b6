"""The share of the time in which accelerators compute: DDP, sgd, DiLoCo and its streaming form on a slow network.

    sudo tools/netlab --hosts 4 --rate 100mbit run --env -- \\
        .venv/bin/python packages/diloco/benchmarks/utilisation.py [--picture streaming.png] [--sides ddp diloco ...]
    .venv/bin/python packages/diloco/benchmarks/utilisation.py --virtual 4

24 layers, 3 M parameters in all, on emulated accelerators that compute for 500 ms a step: the training thread sleeps
meanwhile, as four hosts share this machine's cores. A fragment of an eighth of the layers crosses 4 links of
100 Mbit/s in less than a step. DDP is torch's, on Gloo. `--picture` draws which fragments are under way beside the
steps of rank 0, from a trace of the streaming side. On virtual ranks time is the virtual clock's; there is no DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import hocket
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer

sys.path.append(str(Path(__file__).parents[2] / "gossipgrad" / "benchmarks"))
from emulated import Machine, Timing, measure, measure_ddp

MACHINE = Machine(layers=24, numel=125_000, compute_s=0.5)
PERIOD = 16
#: TCP's payload over a link of 100 Mbit/s.
NETWORK = NetworkModel(latency_s=1e-4, bandwidth_bits_per_s=93.8e6)
PORT = 29_421

_EVERY = f"parameters.0.every={PERIOD}"
_RING = "collective={name: allreduce, algorithm: ring}"

#: The rows: a recipe and overrides; none for DDP.
SIDES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "sgd": ("sgd", f"gradients.0.{_RING}"),
    "diloco": ("diloco", _EVERY, f"parameters.0.{_RING}"),
    "diloco.streaming": ("diloco.streaming", _EVERY, f"parameters.0.{_RING}"),
    "diloco.sparseloco": ("diloco.sparseloco", _EVERY),
    "local": ("local",),
}
STREAMING = "diloco.streaming"


def measured(peer: Peer, sides: list[str]) -> dict[str, Timing]:
    """Measure sides one after the other, each over whole periods; collective."""
    import torch

    torch.set_num_threads(1)
    found = {}
    for name in sides:
        if SIDES[name]:
            found[name] = measure(peer, MACHINE, SIDES[name], _steps(name))
        elif peer.transport != "virtual":
            found[name] = _ddp(peer)
    return found


def _ddp(peer: Peer) -> Timing:
    import torch.distributed as dist

    host = "host0" if "NETLAB_HOST" in os.environ else "127.0.0.1"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{PORT}",
        rank=peer.rank,
        world_size=peer.size,
        timeout=timedelta(minutes=5),
    )
    try:
        return measure_ddp(peer, MACHINE, _steps("ddp"))
    finally:
        dist.destroy_process_group()


def _steps(name: str) -> int:
    """Return how many steps are measured: whole periods, and fewer where all are alike."""
    return PERIOD // 2 if name in {"ddp", "sgd"} else 2 * PERIOD


def report(found: dict[str, Timing]) -> None:
    """Print the table: what steps took, on average over whole periods."""
    print("| strategy | step, ms | computing, % | host waits, ms | CPU, ms a rank |")
    print("|---|---:|---:|---:|---:|")
    for name, timing in found.items():
        print(
            f"| {name} | {1e3 * timing.seconds:.0f} | {100 * MACHINE.compute_s / timing.seconds:.1f} "
            f"| {1e3 * timing.host_wait_s:.1f} | {1e3 * timing.cpu_s:.1f} |"
        )
    if {"diloco", STREAMING} <= found.keys():
        lost = found["diloco"].seconds - MACHINE.compute_s
        hidden = (found["diloco"].seconds - found[STREAMING].seconds) / lost
        print(f"streaming hides {100 * hidden:.1f} % of what diloco loses")


def draw(trace: Path, picture: Path) -> None:
    """Draw rank 0's steps and the fragments under way, from a trace."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("pid") == 1]
    ends = [event["ts"] + event["dur"] for event in events if event.get("cat") == "step"]
    waits = [event for event in events if event.get("cat") == "exposed wait"]
    begun = {event["id"]: event for event in events if event.get("ph") == "b"}
    ended = {event["id"]: event["ts"] for event in events if event.get("ph") == "e"}
    fragments = sorted({event["name"] for event in begun.values()})
    # A period that begins in the middle of the first, when what attach costs is over.
    shown = ends[PERIOD // 2 : PERIOD // 2 + PERIOD + 1]
    start, end = shown[0], shown[-1]
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")

    def bar(row: str, first: float, last: float, color: str) -> None:
        if first >= start and last <= end:
            axes.barh(row, (last - first) / 1e6, left=(first - start) / 1e6, color=color, edgecolor="white")

    for first, last in pairwise(shown):
        bar("steps", first, last, "#b8c1cc")
    for wait in waits:
        bar("steps", wait["ts"], wait["ts"] + wait["dur"], "#c0392b")
    for name in fragments:
        for key in (key for key, event in begun.items() if event["name"] == name and key in ended):
            bar(f"fragment {fragments.index(name)}", begun[key]["ts"], ended[key], "#2f6db5")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(
        "Streaming DiLoCo, 4 hosts, 100 Mbit/s: one rank's steps, its waits (red), and fragments under way",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", type=int, metavar="RANKS", help="on so many virtual ranks")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES, metavar="SIDE")
    parser.add_argument(
        "--picture", type=Path, help="of the fragments under way, as SVG or PNG; its trace as JSON beside it"
    )
    given = parser.parse_args()
    if given.virtual:
        world = hocket.virtual(given.virtual, network=NETWORK)
        report(world.run(lambda: measured(hocket.join(), given.sides))[0])
        return
    with hocket.join() as peer:
        found = measured(peer, given.sides)
        if peer.rank == 0:
            report(found)
        if given.picture is not None:
            trace = given.picture.with_suffix(".json")
            measure(peer, MACHINE, SIDES[STREAMING], 2 * PERIOD, hocket.Trace(trace))
            if peer.rank == 0:
                draw(trace, given.picture)


if __name__ == "__main__":
    main()
