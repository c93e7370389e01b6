"""The paper's table 7 on virtual ranks: 96 ms of computing, 27 ms for an exchange of the model, 4 to 128 ranks.

    .venv/bin/python packages/gossipgrad/benchmarks/table7.py [--ranks 4 8 ...] [--out FILE]

The network's bandwidth is what makes an exchange with one rank take 27 ms; a message takes 10 us to arrive. A step's
time without communication, 96 ms, over its time with it is the efficiency. `agd` sums gradients in a ring, in 8 pieces,
each as soon as backward has made it; simulating its messages, which grow with the square of the ranks, takes 8 minutes
of a core for 64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from emulated import Machine, exchanged_bytes, measure

import hocket
from hocket.transport.network import NetworkModel

MACHINE = Machine(layers=54, numel=1024, compute_s=0.096)  # a ResNet-50 has 54 layers with weights
EXCHANGE_S = 0.027
PIECES = 8
RANKS = (4, 8, 16, 32, 64, 128)

_RING = "gradients.0.collective={name: allreduce, algorithm: ring}"
_PIECES = f"gradients.0.segments={{name: bytes, size_mb: {exchanged_bytes(MACHINE) / PIECES / 2**20}}}"

#: The rows: a recipe and overrides.
SIDES: dict[str, tuple[str, ...]] = {
    "gossipgrad": ("gossipgrad", "samples=null"),
    "gossipgrad, one step late": ("gossipgrad", "samples=null", "parameters.0={overlap: none, delay: 1}"),
    "gossipgrad.gradients": ("gossipgrad.gradients", "samples=null"),
    "agd": ("agd", _RING, _PIECES),
}
PAPER = {
    "paper: GossipGraD": (100, 100, 100, 100, 100, 100),
    "paper: PowerAI, the best allreduce": (100, 100, 98, 99, 97, 95),
}


#: Polls of a ring's many short waits would take hours; at this price they still cost less than its messages' latency.
_RING_POLL_S = 2e-6
_POLL_S = 1e-7


def efficiency(strategy: tuple[str, ...], ranks: int, steps: int) -> float:
    """Return a strategy's efficiency in per cent."""
    network = NetworkModel(
        latency_s=1e-5,
        bandwidth_bits_per_s=8 * exchanged_bytes(MACHINE) / EXCHANGE_S,
        poll_s=_RING_POLL_S if _RING in strategy else _POLL_S,
    )
    world = hocket.virtual(ranks, network=network)
    timing = world.run(lambda: measure(hocket.join(), MACHINE, strategy, steps))[0]
    return 100 * MACHINE.compute_s / timing.seconds


def main() -> None:
    """Measure what the file does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/gossipgrad-table7.json"))
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for ranks in given.ranks:
        for name, strategy in SIDES.items():
            key = f"{name} on {ranks}"
            if key not in found:
                found[key] = efficiency(strategy, ranks, given.steps)
                print(f"{key}: {found[key]:.1f} %", flush=True)
                given.out.write_text(json.dumps(found, indent=1) + "\n")
    print("| efficiency, % | " + " | ".join(f"{ranks} ranks" for ranks in given.ranks) + " |")
    print("|---|" + "---:|" * len(given.ranks))
    for name in SIDES:
        print(
            f"| {name} | " + " | ".join(f"{found[f'{name} on {ranks}']:.1f}" for ranks in given.ranks) + " |"
        )
    for name, values in PAPER.items():
        by_ranks = dict(zip(RANKS, values, strict=True))
        print(f"| {name} | " + " | ".join(str(by_ranks.get(ranks, "")) for ranks in given.ranks) + " |")


if __name__ == "__main__":
    main()
