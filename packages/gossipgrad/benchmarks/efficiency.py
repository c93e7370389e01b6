"""The share of a step that communication adds, over a slow network and an emulated accelerator.

    sudo tools/netlab --hosts 4 --rate 100mbit run -n 4 -- \\
        .venv/bin/python packages/gossipgrad/benchmarks/efficiency.py --out runs/efficiency-netlab.json
    .venv/bin/python packages/gossipgrad/benchmarks/efficiency.py --virtual 4 \\
        --out runs/efficiency-virtual.json --compare runs/efficiency-netlab.json

A model takes 27/96 of a step's computing to cross a link, as in the paper's table 7, or what `--exchange` says. The
efficiency is the step's time without communication over that with it. Allreduces go by messages in a ring, and on the
real network also as MPI has them. `--bandwidth` and `--latency` of virtual messages are those of the real network: TCP
carries 93.8 Mbit/s of payload over a link of 100mbit.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from emulated import Machine, Timing, measure

import hocket
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer

LAYERS = 54  # as many as a ResNet-50 has with weights
COMPUTE_S = 0.96
PAYLOAD_BYTES_PER_S = 93.8e6 / 8

LAYER_BY_LAYER = "gradients.0.segments=layers"
RING = "collective={name: allreduce, algorithm: ring}"
NO_SAMPLES = "samples=null"

#: The rows: a recipe and overrides.
SIDES: dict[str, tuple[str, ...]] = {
    "local": ("local",),
    "gossipgrad": ("gossipgrad", NO_SAMPLES),
    "gossipgrad, progress thread": ("gossipgrad", NO_SAMPLES, "parameters.0.progress=thread"),
    "gossipgrad, one step late": ("gossipgrad", NO_SAMPLES, "parameters.0={overlap: none, delay: 1}"),
    "gossipgrad, one step late, progress thread": (
        "gossipgrad",
        NO_SAMPLES,
        "parameters.0={overlap: none, delay: 1}",
        "parameters.0.progress=thread",
    ),
    "gossipgrad.gradients": ("gossipgrad.gradients", NO_SAMPLES),
    "gossipgrad.gradients, progress thread": (
        "gossipgrad.gradients",
        NO_SAMPLES,
        "gradients.0.progress=thread",
    ),
    "gossipgrad.agd_every_log": ("gossipgrad.agd_every_log", f"parameters.0.{RING}"),
    "agd": ("agd", f"gradients.0.{RING}"),
    "sgd": ("sgd", LAYER_BY_LAYER, f"gradients.0.{RING}"),
    "gossipgrad.agd_every_log, MPI's allreduce": ("gossipgrad.agd_every_log",),
    "agd, MPI's allreduce": ("agd",),
    "sgd, MPI's allreduce": ("sgd", LAYER_BY_LAYER),
}


def main() -> None:
    """Measure all sides and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", type=int, metavar="RANKS", help="on so many virtual ranks")
    parser.add_argument(
        "--exchange", type=float, default=27 / 96, help="a model's transfer, of a step's computing"
    )
    parser.add_argument("--compute-s", type=float, default=COMPUTE_S, help="of a step")
    parser.add_argument(
        "--bandwidth", type=float, default=PAYLOAD_BYTES_PER_S, help="of a link, bytes a second"
    )
    parser.add_argument("--latency", type=float, default=1e-4, help="of a virtual message, seconds")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES, metavar="SIDE")
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--compare", type=Path, help="figures of the real network to print beside these")
    given = parser.parse_args()
    numel = round(given.exchange * given.compute_s * given.bandwidth / 4 / LAYERS)
    machine = Machine(LAYERS, numel, given.compute_s)
    if given.virtual:
        network = NetworkModel(latency_s=given.latency, bandwidth_bits_per_s=8 * given.bandwidth)
        world = hocket.virtual(given.virtual, network=network)
        found = world.run(lambda: measured(hocket.join(), machine, given))[0]
    else:
        with hocket.join() as peer:
            found = measured(peer, machine, given)
            if peer.rank:
                return
    report(found, given)


def measured(peer: Peer, machine: Machine, given: argparse.Namespace) -> dict[str, Timing]:
    """Measure every side, one after the other."""
    import torch

    torch.set_num_threads(1)
    found = {}
    for name in given.sides:
        # There is no MPI on virtual ranks.
        if not (given.virtual and "MPI" in name):
            found[name] = measure(peer, machine, SIDES[name], given.steps)
    return found


def report(found: dict[str, Timing], given: argparse.Namespace) -> None:
    """Print the figures as a table, and write them."""
    real = {} if given.compare is None else json.loads(given.compare.read_text())
    beside = " real network | virtual / real |" if real else ""
    print(f"| strategy | step, ms | efficiency, % | host waits, ms | CPU, ms a rank |{beside}")
    print("|---|---:|---:|---:|---:|" + "---:|---:|" * bool(real))
    local_s = found["local"].seconds if "local" in found else given.compute_s
    for name, timing in found.items():
        line = (
            f"| {name} | {1e3 * timing.seconds:.1f} | {100 * local_s / timing.seconds:.1f} "
            f"| {1e3 * timing.host_wait_s:.1f} | {1e3 * timing.cpu_s:.1f} |"
        )
        if name in real:
            line += f" {1e3 * real[name]['seconds']:.1f} | {timing.seconds / real[name]['seconds']:.2f} |"
        print(line)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(
            json.dumps({name: asdict(timing) for name, timing in found.items()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
