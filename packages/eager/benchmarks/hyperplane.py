"""Hyperplane regression with one random rank delayed in each step: eager-SGD against synchronous SGD.

    python packages/eager/benchmarks/hyperplane.py [--ranks 8] [--epochs 48] [--out FOLDER] [--toy]

All sides run in one job over real MPI, one after the other. A delay is a sleep before the step, of 0.2, 0.3 or 0.4 s,
of one rank that is drawn for each step. Time is that of the whole training, from a common start until the last rank
has done its last step; nothing is evaluated meanwhile. T is the step's time of `sgd` without delays, and the bound on
what can be gained (T + d) / (T + d / P): a rank's own delays. Every side ends with the validation loss of the
replicas' mean.

Source: eager-SGD (Li et al.), sec. 7.2.1, Fig. 10: solo 1.50, 1.75 and 2.01 times faster for 200, 300 and 400 ms,
with 8 processes, at an equal validation loss of about 4.7 after 48 epochs of 16 steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.delays import RandomSubset
from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from hocket.transport.peer import Peer

BATCH = 2048  # of all ranks together
SEED = 0
DELAYS_S = (0.0, 0.2, 0.3, 0.4)

#: Of 0.1, 0.2, 0.3, 0.5 and 1 the one with which `sgd` learns most in 48 epochs; inputs are small. It learns a little
#: more with 0.1 and momentum 0.9 (a loss of 4.59 for 4.89), with which stale gradients diverge.
LEARNING_RATE = 0.5

_SUM = "gradients.0.collective.missed=sum"
_EVERY = "parameters.0.every=192"  # 12 epochs

#: A recipe and overrides.
SIDES: dict[str, tuple[str, ...]] = {
    "sgd": ("sgd",),
    "eager.solo": ("eager.solo", _EVERY),
    "eager.solo, sum": ("eager.solo", _EVERY, _SUM),
    "eager.majority, sum": ("eager.majority", _EVERY, _SUM),
}


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=48)
    parser.add_argument("--delays-s", type=float, nargs="*", default=list(DELAYS_S))
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES, metavar="SIDE")
    parser.add_argument("--out", type=Path, default=Path("runs/eager-hyperplane"))
    parser.add_argument("--toy", action="store_true", help="2 ranks, few steps: whether it works")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.toy:
        given.ranks, given.epochs, given.delays_s = 2, 1, [0.0, 0.05]
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
    text = table(json.loads((given.out / "figures.json").read_text()))
    (given.out / "table.md").write_text(text)
    print(text)


def be_rank(given: argparse.Namespace) -> None:
    """Train with every side and delay; rank 0 writes the figures, and goes on where they end."""
    import hocket

    peer = hocket.join()
    path = given.out / "figures.json"
    settings = {"ranks": peer.size, "epochs": given.epochs}
    found: dict[str, Any] = {**settings, "rows": []}
    if path.exists():
        earlier = json.loads(path.read_text())
        if all(earlier.get(key) == value for key, value in settings.items()):
            found = earlier
    found = gather(peer, found)[0]
    for delay_s in given.delays_s:
        for side in given.sides:
            if any((row["side"], row["delay_s"]) == (side, delay_s) for row in found["rows"]):
                continue
            row = train(peer, side, delay_s, given.epochs)
            found["rows"].append(row)
            if peer.rank == 0:
                print(
                    f"{side}, {delay_s:g} s: {row['seconds']:.1f} s, loss {row['valid_loss']:.3f}", flush=True
                )
                path.write_text(json.dumps(found, indent=1) + "\n")
    peer.close()


def train(peer: Peer, side: str, delay_s: float, epochs: int) -> dict[str, Any]:
    """Train once; return the time and what was found."""
    import torch

    import hocket
    from hocket_tasks.hyperplane import Hyperplane

    torch.set_num_threads(1)
    task = Hyperplane()
    data = task.data(SEED)
    torch.manual_seed(SEED)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = hocket.loader(data.train, BATCH // peer.size, seed=SEED)
    delays = RandomSubset(1, delay_s)
    barrier = peer.lane("start")
    with hocket.attach(model, optimizer, hocket.compose(*SIDES[side]), peer=peer) as session:
        barrier.ibarrier().wait()
        start_s = peer.clock.now()
        for _ in range(epochs):
            # Not `session.data`, at the end of which ranks wait for each other: all have as many batches.
            for batch in loader:
                peer.clock.sleep(float(delays.of_step(session.step, peer.size, SEED)[peer.rank]))
                optimizer.zero_grad()
                task.loss(model(batch[0]), batch[1]).backward()
                optimizer.step()
        own_s = peer.clock.now() - start_s
        seconds = max(session.gather(own_s))
        session.consensus()
        with torch.no_grad():
            valid = [task.loss(model(x), y).item() for x, y in map(_stacked, _blocks(data.valid))]
        counters = session.counters
        told = session.gather([counters.outcomes, counters.active, counters.staleness_max])
        steps = session.step
    barrier.close()
    outcomes, active, staleness = zip(*told, strict=True)
    return {
        "side": side,
        "delay_s": delay_s,
        "seconds": seconds,
        "steps": steps,
        "valid_loss": sum(valid) / len(valid),
        "active_mean": sum(active) / sum(outcomes),
        "staleness_max": max(staleness),
    }


def _blocks(samples: Any, size: int = 512) -> list[list[Any]]:
    return [[samples[i] for i in range(start, start + size)] for start in range(0, len(samples), size)]


def _stacked(samples: list[Any]) -> tuple[Any, Any]:
    import torch

    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs), torch.stack(ys)


def table(found: dict[str, Any]) -> str:
    """Return the figures in markdown."""
    rows = found["rows"]
    steps_s = {(row["side"], row["delay_s"]): row["seconds"] / row["steps"] for row in rows}
    step_s = steps_s.get(("sgd", 0.0), float("nan"))
    lines = [
        f"{found['ranks']} ranks, {found['epochs']} epochs; a step of `sgd` without delays: {1e3 * step_s:.1f} ms.",
        "",
        "| delay, ms | strategy | step, ms | times faster than sgd | of the bound, % | validation loss "
        "| active ranks | staleness |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: row["delay_s"]):
        delay_s = row["delay_s"]
        own_s = steps_s[row["side"], delay_s]
        ratio = steps_s.get(("sgd", delay_s), float("nan")) / own_s
        bound = (step_s + delay_s) / (step_s + delay_s / found["ranks"])
        lines.append(
            f"| {1e3 * delay_s:g} | {row['side']} | {1e3 * own_s:.1f} | {ratio:.2f} | {100 * ratio / bound:.0f} "
            f"| {row['valid_loss']:.3f} | {row['active_mean']:.2f} | {row['staleness_max']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
