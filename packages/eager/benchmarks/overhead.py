"""The training thread's time for a partial allreduce when nothing is late.

    python packages/eager/benchmarks/overhead.py [--ranks 2] [--blocks 20]

As many ranks as cores train a small CNN, in blocks of steps of which each belongs to another side, in turns: without
any exchange (`local`), with core's allreduce (`sgd`), and with a partial allreduce that waits for the last of all, by
messages, which a progress thread carries out, and in shared memory, which needs none. A step's computing is its time
less what the training thread waits for exchanges; what the progress thread takes from it is what is beyond `sgd`,
whose training thread copies gradients just as well.

Source: eager-SGD (Li et al.), sec. 4.3, which offloads to a thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from hocket.transport.peer import Peer

STEPS, WARM_UP, BATCH = 20, 3, 64
FULL = "{name: eager.partial_allreduce, candidates: null, starts: last, shared: %s}"
SIDES: dict[str, tuple[str, ...]] = {
    "local": ("local",),
    "sgd": ("sgd",),
    "eager, messages": ("eager.solo", f"gradients.0.collective={FULL % 'false'}", "parameters=[]"),
    "eager, shared": ("eager.solo", f"gradients.0.collective={FULL % 'true'}", "parameters=[]"),
}


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        be_rank(given.blocks)
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(
            launch(
                find_mpiexec(),
                given.ranks,
                [sys.executable, __file__, *sys.argv[1:], "--rank"],
                folder=Path(folder),
                environment={"OMP_NUM_THREADS": "1"},
            )
        )


def be_rank(blocks: int) -> None:
    """Measure all sides in turns; rank 0 prints the table."""
    import torch

    import hocket

    torch.set_num_threads(1)
    peer = hocket.join()
    steps_s: dict[str, list[float]] = {side: [] for side in SIDES}
    waits_s: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(blocks):
        for side in SIDES:
            step_s, wait_s = measure(peer, side)
            steps_s[side].append(step_s)
            waits_s[side].append(wait_s)
    told = gather(peer, [steps_s, waits_s])
    if peer.rank == 0:
        steps = {side: statistics.median(of for rank, _ in told for of in rank[side]) for side in SIDES}
        waits = {side: statistics.median(of for _, rank in told for of in rank[side]) for side in SIDES}
        print("| side | step, ms | of it waiting, ms | computing, ms | beyond sgd, % |")
        print("|---|---:|---:|---:|---:|")
        for side in SIDES:
            own_s, sgd_s = steps[side] - waits[side], steps["sgd"] - waits["sgd"]
            print(
                f"| {side} | {1e3 * steps[side]:.2f} | {1e3 * waits[side]:.2f} | {1e3 * own_s:.2f} "
                f"| {100 * (own_s / sgd_s - 1):.1f} |"
            )
    peer.close()


def measure(peer: Peer, side: str) -> tuple[float, float]:
    """Return the median step of a block and its median wait, in seconds."""
    import torch
    from torch.nn.functional import cross_entropy

    import hocket
    from hocket_tasks.fashion_mnist import FashionMNIST

    torch.manual_seed(0)
    model: Any = FashionMNIST().model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    barrier = peer.lane("start")
    steps_s, waits_s = [], []
    with hocket.attach(model, optimizer, hocket.compose(*SIDES[side]), peer=peer) as session:
        barrier.ibarrier().wait()
        for step in range(WARM_UP + STEPS):
            before_s, start_s = session.counters.exposed_wait_s, time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if step >= WARM_UP:
                steps_s.append(time.perf_counter() - start_s)
                waits_s.append(session.counters.exposed_wait_s - before_s)
    barrier.close()
    return statistics.median(steps_s), statistics.median(waits_s)


if __name__ == "__main__":
    main()
