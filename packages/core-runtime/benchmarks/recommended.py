"""What `hocket recommend` predicts, and what compressing takes here, against steps on hosts with slow links.

    sudo tools/netlab --hosts 4 --rate 1gbit run --env -- \\
        .venv/bin/python packages/core-runtime/benchmarks/recommended.py --bandwidth 1gbit [--late 1x300ms]

24 layers, 1.2 M parameters in all, on emulated accelerators that compute for 100 ms a step, as the hosts share this
machine's cores; with `run -n 8` two ranks on each of the hosts. Each strategy's steps are measured over whole periods,
and predicted from the network's nominal rate. The last lines say by how much predictions are off, and which pairs that
differ by more than 15 % are in another order.
Needs hocket-gossipgrad's benchmarks, hocket-diloco, hocket-eager and hocket-redsync.
"""

from __future__ import annotations

import argparse
import sys
from itertools import combinations
from pathlib import Path

import torch

import hocket
from hocket.cli.recommend_options import late_ranks
from hocket.delays import Delays
from hocket.plan.advice import predict
from hocket.plan.lateness import held_up_seconds
from hocket.plan.plan import plan
from hocket.quantities import bits_per_second
from hocket.session.ranks import find_ranks
from hocket.strategy.scope import Placement
from hocket.training.run import load_run
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer

sys.path.append(str(Path(__file__).parents[2] / "gossipgrad" / "benchmarks"))
from emulated import Machine, measure
from packing_time import packing_seconds

MACHINE = Machine(layers=24, numel=50_000, compute_s=0.1)
LATENCY_S = 1e-4
#: Strategies, and over how many steps they are measured: whole periods.
SIDES = {
    "sgd": 24,
    "agd": 24,
    "dpsgd": 24,
    "sgp": 24,
    "periodic_average": 48,
    "diloco": 60,
    "redsync": 48,
    "eager.solo": 48,
}
#: Those that exchange within hosts of several ranks first.
IN_STAGES = {"hierarchical_sgd": 24, "diloco.two_level": 60}
DIFFERENT = 1.15


def predicted(name: str, placement: Placement, bandwidth: float, delays: Delays | None) -> float:
    """Return the predicted seconds of a step."""
    network = NetworkModel(latency_s=LATENCY_S, bandwidth_bits_per_s=bandwidth)
    with torch.device("meta"):
        layers = (torch.nn.Linear(MACHINE.numel, 1, bias=False) for _ in range(MACHINE.layers))
        model = torch.nn.Sequential(*layers)
    planned = plan(hocket.compose(name), model, placement, network)
    held_up_s = 0.0 if delays is None else held_up_seconds(planned, MACHINE.compute_s, delays)
    return predict(planned, MACHINE.compute_s, held_up_s).step_s + packing_seconds(planned)


def report(found: dict[str, float], told: dict[str, float]) -> None:
    """Print the table, and what is wrong with it."""
    print("| strategy | measured, ms | predicted, ms | predicted / measured |\n|---|---:|---:|---:|")
    for name, measured_s in sorted(found.items(), key=lambda item: item[1]):
        print(f"| {name} | {1e3 * measured_s:.0f} | {1e3 * told[name]:.0f} | {told[name] / measured_s:.2f} |")
    turned = [
        f"{one} and {other}"
        for one, other in combinations(sorted(found, key=lambda name: found[name]), 2)
        if found[other] > DIFFERENT * found[one] and told[other] <= told[one]
    ]
    off = max(max(told[name] / s, s / told[name]) for name, s in found.items())
    print(f"off by a factor of {off:.2f} at most; in another order: {', '.join(turned) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--late")
    parser.add_argument("--sides", nargs="*", choices=SIDES | IN_STAGES, metavar="SIDE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    late = [f"delays={late_ranks(options.late)!r}"] if options.late else []
    delays = load_run("sgd", late).delays
    found = {}
    with hocket.join() as peer:
        placement = find_ranks(peer).placement
        sides = options.sides or [*SIDES, *(IN_STAGES if peer.size > len(set(placement.hosts)) else ())]
        for name in sides:
            found[name] = _measured(peer, name, delays)
        if peer.rank == 0:
            bandwidth = bits_per_second(options.bandwidth)
            report(found, {name: predicted(name, placement, bandwidth, delays) for name in found})


def _measured(peer: Peer, name: str, delays: Delays | None) -> float:
    timing = measure(peer, MACHINE, (name,), (SIDES | IN_STAGES)[name], delays=delays)
    if peer.rank == 0:
        print(f"{name}: {1e3 * timing.seconds:.0f} ms", file=sys.stderr, flush=True)
    return timing.seconds


if __name__ == "__main__":
    main()
