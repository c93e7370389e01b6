"""Partial allreduces between hosts: latency, steps with late ranks, idle ranks, and a thread that holds the GIL.

    sudo tools/netlab --hosts 8 --rate 1gbit run --env -- .venv/bin/python packages/eager/benchmarks/hosts.py

Ranks meet as any job's do; they must share a machine, whose clock they compare. Four tables:

- Latency: rank i arrives i + 1 ms after a common start, as in `hocket bench partial_allreduce`.
- Steps: 1.2 M parameters in 24 layers on emulated accelerators that compute for 100 ms (hocket-gossipgrad's
  benchmarks). In each step as many ranks as the column says, others each time, are 300 ms late.
- Idle: CPU that all ranks together use while a partial allreduce of each kind is open and nobody arrives.
- GIL: rank 0 is 200 ms late in each step, asleep or in C code that keeps the interpreter's lock, so that its progress
  thread cannot answer. Told is a step of the others.

Source: eager-SGD (Li et al.), sec. 7.1 and 7.2.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hocket
from hocket.delays import RandomSubset
from hocket.transport.peer import Peer, gather
from hocket_eager.benchmark.skewed import PeerGround, idle_cores, measure
from hocket_eager.collective import PartialAllreduce, Quorum

sys.path.append(str(Path(__file__).parents[2] / "gossipgrad" / "benchmarks"))
import emulated

MACHINE = emulated.Machine(layers=24, numel=50_000, compute_s=0.1)
LATE_S, LATE = 0.3, (0, 1, 2, 3)
HELD_S, GIL_STEPS = 0.2, 20
SIZES = (64, 65536, 1 << 20)

PARTIAL = {
    "solo": PartialAllreduce(candidates=None),
    "majority": PartialAllreduce(candidates=1),
    "first of 2": PartialAllreduce(candidates=2),
    "last of 2": PartialAllreduce(candidates=2, starts=Quorum.LAST),
    "last of 4": PartialAllreduce(candidates=4, starts=Quorum.LAST),
}


def strategy(side: str) -> tuple[str, ...]:
    """Return a recipe and overrides: `sgd`, or a partial allreduce that hands out sums of what was missed."""
    if side == "sgd":
        return ("sgd",)
    given = PARTIAL[side]
    candidates = "null" if given.candidates is None else given.candidates
    told = f"candidates: {candidates}, starts: {given.starts.value}, missed: sum"
    collective = f"{{name: eager.partial_allreduce, {told}}}"
    return ("eager", f"gradients.0.collective={collective}")


def table(head: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def latencies(peer: Peer, iterations: int) -> list[list[str]]:
    """Return rows of mean latencies over ranks, and of the first to arrive, in ms."""
    ground, rows = PeerGround(peer), []
    for nbytes in SIZES:
        row = [f"{nbytes:,}"]
        for side in ("allreduce", *PARTIAL):
            found = measure(ground, PARTIAL, side, nbytes, iterations)
            row.append(f"{1e3 * found['mean_s']:.2f} ({1e3 * found['first_s']:.2f})")
        rows.append(row)
    return rows


def steps(peer: Peer, count: int) -> list[list[str]]:
    """Return rows of steps a second, by how many ranks are late."""
    rows = []
    for side in ("sgd", *PARTIAL):
        row = [side]
        for late in LATE:
            delays = RandomSubset(count=late, seconds=LATE_S) if late else None
            timing = emulated.measure(peer, MACHINE, strategy(side), count, delays=delays)
            row.append(f"{1 / timing.seconds:.2f}")
        rows.append(row)
    return rows


def sleep_with_the_gil(seconds: float) -> None:
    """Sleep in C, without letting other threads of the interpreter run."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def step_of_others(peer: Peer, side: str, hold: Callable[[float], None]) -> float:
    """Return the mean seconds of a step of all ranks but 0, which is held up in each; collective."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 512)
    with hocket.attach(
        model, optimizer, hocket.compose(*strategy(side), "parameters=[]"), peer=peer
    ) as session:
        begin_s = 0.0
        for step in range(GIL_STEPS + 2):
            if step == 2:
                begin_s = peer.clock.now()
            if peer.rank == 0:
                hold(HELD_S)
            else:
                peer.clock.sleep(0.01)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        seconds = (peer.clock.now() - begin_s) / GIL_STEPS
        session.settle()
    others = gather(peer, seconds)[1:]
    return sum(others) / len(others)


def gil(peer: Peer) -> list[list[str]]:
    """Return rows of the others' milliseconds a step."""
    rows = []
    for side in PARTIAL:
        asleep, held = (step_of_others(peer, side, hold) for hold in (peer.clock.sleep, sleep_with_the_gil))
        rows.append([side, f"{1e3 * asleep:.1f}", f"{1e3 * held:.1f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=32, help="of each latency")
    parser.add_argument("--steps", type=int, default=24, help="of each side with late ranks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with hocket.join() as peer:
        found = [latencies(peer, given.iterations), steps(peer, given.steps), gil(peer)]
        idle = idle_cores(peer, PARTIAL)
        if peer.rank == 0:
            print(f"{peer.size} ranks over {peer.transport}\n")
            print("Latency, ms: mean over ranks, in brackets of the first to arrive\n")
            table(["bytes", "allreduce", *PARTIAL], found[0])
            print(f"Steps a second, ranks that are {1e3 * LATE_S:.0f} ms late in each step\n")
            table(["strategy", *map(str, LATE)], found[1])
            print(f"A step of the others, ms, where rank 0 is held up by {1e3 * HELD_S:.0f} ms\n")
            table(["strategy", "asleep", "holding the GIL"], found[2])
            print(f"Idle, a rank uses {idle / peer.size:.4f} cores")


if __name__ == "__main__":
    main()
