"""The latency of partial allreduces against an allreduce, when ranks arrive one after the other.

    hocket bench partial_allreduce [--ranks 32] [--virtual] [--out FOLDER] [--toy]

Rank i of P arrives i + 1 ms after a common start, in each of 64 iterations; ranks are synchronised before each, as in
the paper. A rank's latency is the time from its arrival until it has a result; the table has the mean over ranks and
iterations, and that of the first to arrive alone, and how many times below the allreduce's each is. `active` is how
many ranks had come when a round took its contributions, on average over iterations. As in eager-SGD, what comes too
late goes into the next round.

Over MPI on this machine there are two baselines: MPI_Allreduce, which the paper takes, and MPI_Iallreduce that is
polled with the core given away between looks, which is faster where there are more ranks than cores; ratios are to the
faster one of each size. Partial allreduces go by messages and over memory that the ranks share (`shared`). With
--virtual each rank has a core of its own, and messages take what the network model says (20 us and 10 Gbit/s).

Source: eager-SGD (Li et al.), sec. 7.1, Figs. 8 and 9: 32 processes on 32 nodes, solo 53.32 and majority 2.46 times
below MPI_Allreduce on average over 64 B to 4 MB. With ranks synchronised before each iteration, majority cannot
exceed 3P / (P + 1), 2.91 for 32 ranks.
"""

# Over MPI nothing here imports torch.
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from hocket.api import claim, plain
from hocket_eager.benchmark.figures import table
from hocket_eager.benchmark.skewed import Ground, PeerGround, RealGround, idle_cores, measure
from hocket_eager.collective import Algorithm, PartialAllreduce

SIZES = (64, 4096, 65536, 1 << 20, 4 << 20)
ITERATIONS = 64

#: Candidates of each kind.
KINDS = {"solo": None, "majority": 1}
REAL_SIDES = {
    f"{name}, {path}": PartialAllreduce(
        candidates=candidates, algorithm=Algorithm.STAR, shared=path == "shared"
    )
    for path in ("messages", "shared")
    for name, candidates in KINDS.items()
}
VIRTUAL_SIDES = {
    f"{name}, {algorithm}": PartialAllreduce(candidates=candidates, algorithm=algorithm)
    for algorithm in (Algorithm.RECURSIVE_DOUBLING, Algorithm.RING)
    for name, candidates in KINDS.items()
}


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--virtual", action="store_true", help="on virtual ranks, with a core for each")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="bytes")
    parser.add_argument("--out", type=Path, default=Path("runs/partial_allreduce"))
    parser.add_argument("--toy", action="store_true", help="4 ranks, few iterations, small: whether it works")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.toy:
        given.ranks, given.iterations, given.sizes = 4, 8, [64, 65536]
    if given.rank:
        be_rank(given)
        return
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        claim(given.out, "figures.json", "table.md")
    except OSError as error:
        parser.error(f"--out {given.out} cannot be written: {error.strerror}")
    figures = given.out / "figures.json"
    if given.virtual:
        figures.write_text(json.dumps(on_virtual_ranks(given), indent=1) + "\n")
    else:
        ranks = ["launch", "--transport", "mpi", "-n", str(given.ranks), __file__, *sys.argv[1:], "--rank"]
        status = subprocess.run([sys.executable, "-m", "hocket", *ranks], check=False).returncode
        if status:
            sys.exit(status)
    found = json.loads(figures.read_text())
    text = table(found)
    (given.out / "table.md").write_text(text)
    print(text)


def be_rank(given: argparse.Namespace) -> None:
    """Measure as a rank of an MPI job, and let rank 0 write the figures."""
    import hocket

    peer = hocket.join()
    found = measured(RealGround(peer), REAL_SIDES, given)
    idle = idle_cores(peer, REAL_SIDES)
    if peer.rank == 0:
        cores = len(os.sched_getaffinity(0))
        found["where"] = f"{cores} cores (idle, all ranks together use {idle:.3f})"
        (given.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    peer.close()


def on_virtual_ranks(given: argparse.Namespace) -> plain.Tree:
    """Return the figures of virtual ranks."""
    import hocket

    def body() -> plain.Tree:
        return measured(PeerGround(hocket.join()), VIRTUAL_SIDES, given)

    found: plain.Tree = hocket.virtual(given.ranks).run(body)[0]
    return {**found, "where": "a virtual core each"}


def measured(ground: Ground, sides: dict[str, PartialAllreduce], given: argparse.Namespace) -> plain.Tree:
    """Return the figures of all sizes and sides; rank 0 prints as they come."""
    rows = []
    for nbytes in given.sizes:
        for side in (*ground.baselines, *sides):
            row = measure(ground, sides, side, nbytes, given.iterations)
            rows.append({"side": side, "bytes": nbytes, **row})
            if ground.peer.rank == 0:
                print(f"{side}, {nbytes} bytes: {1e3 * row['mean_s']:.3f} ms", flush=True)
    return {"ranks": ground.peer.size, "baselines": ground.baselines, "rows": rows}


if __name__ == "__main__":
    main()
