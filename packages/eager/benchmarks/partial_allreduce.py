"""The latency of partial allreduces against MPI's, when ranks arrive one after the other.

    python packages/eager/benchmarks/partial_allreduce.py [--ranks 32] [--out FOLDER] [--toy]

Rank i of P arrives i + 1 ms after a common start, in each of 64 iterations; ranks are synchronised before each, as in
the paper. A rank's latency is the time from its arrival until it has a result; the table has the mean over ranks and
iterations, and that of the first to arrive alone, each with MPI's over it. `active` is how many ranks had come when a
round took its contributions, on average over iterations. As in eager-SGD, what comes too late goes into the next
round.

Two MPI baselines: MPI_Allreduce, which the paper takes, and MPI_Iallreduce that is polled with the core given away
between looks, which is faster where there are more ranks than cores; ratios are to the faster one of each size.
Partial allreduces go by messages and over memory that the ranks share (`shared`). Nothing here imports torch.

Source: eager-SGD (Li et al.), sec. 7.1, Figs. 8 and 9: 32 processes on 32 nodes, solo 53.32 and majority 2.46 times
below MPI_Allreduce on average over 64 B to 4 MB. With ranks synchronised before each iteration, majority cannot
exceed 3P / (P + 1), 2.91 for 32 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.progress import ThreadProgress
from hocket.transport import mpi
from hocket.transport.launching import find_mpiexec, launch
from hocket_eager import Algorithm, PartialAllreduce
from hocket_eager.opening import open_sums

if TYPE_CHECKING:
    from hocket.transport.mpi import MPIPeer

SIZES = (64, 4096, 65536, 1 << 20, 4 << 20)
ITERATIONS = 64
WARM_UP = 8
#: From the moment on which all have agreed until the first arrives, and from the last arrival until the next agreement.
SETTLE_S = 0.02

SIDES: dict[str, PartialAllreduce] = {
    f"{name}, {path}": PartialAllreduce(
        candidates=candidates, algorithm=Algorithm.STAR, shared=path == "shared"
    )
    for path in ("messages", "shared")
    for name, candidates in (("solo", None), ("majority", 1))
}
BASELINES = ("MPI_Allreduce", "MPI_Iallreduce, polled")


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="bytes")
    parser.add_argument("--sides", nargs="*", default=[*BASELINES, *SIDES], metavar="SIDE")
    parser.add_argument("--out", type=Path, default=Path("runs/partial_allreduce"))
    parser.add_argument("--toy", action="store_true", help="4 ranks, few iterations, small: whether it works")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.toy:
        given.ranks, given.iterations, given.sizes = 4, 8, [64, 65536]
    if given.rank:
        be_rank(given)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        status = launch(
            find_mpiexec(),
            given.ranks,
            [sys.executable, __file__, *sys.argv[1:], "--rank"],
            folder=Path(folder),
            environment={"OMP_NUM_THREADS": "1"},
        )
    if status:
        sys.exit(status)
    found = json.loads((given.out / "figures.json").read_text())
    text = table(found)
    (given.out / "table.md").write_text(text)
    print(text)
    draw(found, given.out / "figures.png")


# ------------------------------------------------------------------------------------------------ as a rank


def be_rank(given: argparse.Namespace) -> None:
    """Measure, and let rank 0 write the figures."""
    peer = mpi.join()
    rows = []
    for nbytes in given.sizes:
        for side in given.sides:
            row = measure(peer, side, nbytes, given.iterations)
            rows.append({"side": side, "bytes": nbytes, **row})
            if peer.rank == 0:
                print(f"{side}, {nbytes} bytes: {1e3 * row['mean_s']:.3f} ms", flush=True)
    idle = idle_cores(peer)
    if peer.rank == 0:
        cores = len(os.sched_getaffinity(0))
        found = {"ranks": peer.size, "cores": cores, "idle_cores": idle, "rows": rows}
        (given.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    peer.close()


def measure(peer: MPIPeer, side: str, nbytes: int, iterations: int) -> dict[str, float]:
    """Return a side's mean latency over ranks, that of the first to arrive, and the mean number of active ranks."""
    send, receive = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    if side in BASELINES:
        call = baseline(side, send, receive)
        latencies, active = skewed(peer, call, iterations), [peer.size] * iterations
    else:
        progress = ThreadProgress()
        sums, close = open_sums(SIDES[side], peer, progress, side, [(side, 0, send)])
        told: list[int] = []

        def partial(round: int) -> None:
            sums[0].propose(send, round)
            sums[0].wait(round)
            told.append(sums[0].fetch(round, receive).num_active)

        latencies = skewed(peer, partial, iterations)
        active = told[WARM_UP:]
        sums[0].close()
        close()
        progress.close()
    everyone = gather(peer, [float(np.mean(latencies)), float(np.std(latencies)), float(np.mean(active))])
    means = [mean for mean, _, _ in everyone]
    return {"mean_s": float(np.mean(means)), "first_s": means[0], "active": everyone[0][2]}


def baseline(side: str, send: Any, receive: Any) -> Callable[[int], None]:
    """Return a call of MPI's own."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def blocking(round: int) -> None:
        comm.Allreduce(send, receive)

    def polled(round: int) -> None:
        request = comm.Iallreduce(send, receive)
        while not request.Test():
            os.sched_yield()

    return blocking if side == "MPI_Allreduce" else polled


def skewed(peer: MPIPeer, call: Callable[[int], None], iterations: int) -> list[float]:
    """Return the seconds that this rank's calls take, each after a start that all read from one clock."""
    from mpi4py import MPI

    seconds = []
    for round in range(WARM_UP + iterations):
        # A barrier alone lets go of 32 ranks on 2 cores over milliseconds.
        start_s = MPI.COMM_WORLD.allreduce(time.monotonic(), MPI.MAX) + SETTLE_S
        time.sleep(max(start_s + 1e-3 * (peer.rank + 1) - time.monotonic(), 0.0))
        arrived_s = time.monotonic()
        call(round)
        seconds.append(time.monotonic() - arrived_s)
        # Those who are done early would burn the cores of those who are not, in MPI's own wait.
        time.sleep(max(start_s + 1e-3 * peer.size + SETTLE_S - time.monotonic(), 0.0))
    return seconds[WARM_UP:]


def idle_cores(peer: MPIPeer) -> float:
    """Return the CPU seconds a second of all ranks with one partial allreduce of each kind open and idle."""
    progress = ThreadProgress()
    like = np.ones(16, np.float32)
    opened = [open_sums(side, peer, progress, name, [(name, 0, like)]) for name, side in SIDES.items()]
    time.sleep(1.0)
    before_s, begin_s = _cpu_s(), time.monotonic()
    time.sleep(1.0)
    own = (_cpu_s() - before_s) / (time.monotonic() - begin_s)
    for sums, close in opened:
        sums[0].close()
        close()
    progress.close()
    return float(sum(gather(peer, own)))


def gather(peer: MPIPeer, value: Any) -> list[Any]:
    """Return every rank's value."""
    return [json.loads(told) for told in peer.allgather_bytes(json.dumps(value).encode())]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ---------------------------------------------------------------------------------------------- what is shown


def table(found: dict[str, Any]) -> str:
    """Return the figures in markdown."""
    lines = [
        f"{found['ranks']} ranks on {found['cores']} cores, arriving 1 to {found['ranks']} ms after a common start; "
        f"idle, all ranks together use {found['idle_cores']:.3f} cores.",
        "",
        "| bytes | side | mean latency, ms | times below MPI | first arriver, ms | times below MPI | active ranks |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for nbytes in dict.fromkeys(row["bytes"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["bytes"] == nbytes]
        mean_s, first_s = (
            min((row[key] for row in rows if row["side"] in BASELINES), default=float("nan"))
            for key in ("mean_s", "first_s")
        )
        lines += [
            f"| {nbytes} | {row['side']} | {1e3 * row['mean_s']:.3f} | {mean_s / row['mean_s']:.2f} "
            f"| {1e3 * row['first_s']:.3f} | {first_s / row['first_s']:.2f} | {row['active']:.1f} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw latency and active ranks over sizes, as the paper's figures 8 and 9 do."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for side in dict.fromkeys(row["side"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["side"] == side]
        sizes = [row["bytes"] for row in rows]
        above.loglog(sizes, [1e3 * row["mean_s"] for row in rows], marker="o", label=side)
        below.semilogx(sizes, [row["active"] for row in rows], marker="o", label=side)
    above.set(xlabel="bytes", ylabel="latency, ms, mean over ranks")
    below.set(xlabel="bytes", ylabel="active ranks, mean over iterations")
    above.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
