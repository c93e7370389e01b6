"""Time of a training step over MPI: crossover against whole-model SGP, and both against sgd and a local step.

    python packages/crossover/benchmarks/step_time.py [RANKS]

18 linear layers of 1178 x 1178 (25 M parameters, 100 MB; ResNet-50 has as many blocks), batch 4, SGD, one thread per
rank; all sides in one job, in turns of some steps. A turn begins with a step that is not measured, and what is under
way at its end is waited for outside of the measurement: in between each step hides what it can. The last column is
what NumPy and Python allocate in a step beyond what they had, at most, in multiples of the model. A rank holds every
side's model: 8 ranks take 12 GB.
"""

from __future__ import annotations

import copy
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hocket
from hocket.transport.peer import gather

sys.path.append(str(Path(__file__).parents[2] / "core-runtime" / "benchmarks"))
from measuring import medians, run_ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hocket.transport.peer import Peer

WIDTH, LAYERS, BATCH = 1178, 18, 4
STEPS, REPEATS = 5, 15

SIDES = {
    "local": ["local"],
    "sgd": ["sgd"],
    "sgp": ["sgp", "parameters.0.segments=model", "parameters.0.overlap=none"],
    "sgp, forward": ["sgp", "parameters.0.segments=model", "parameters.0.overlap=forward"],
    "crossover, none": ["crossover", "parameters.0.overlap=none"],
    "crossover, forward": ["crossover"],
    "whole_model, none": ["crossover.whole_model", "parameters.0.overlap=none"],
    "hierarchical": ["crossover.hierarchical"],
}


@dataclass
class Side:
    """A way to train: one step, waiting for what is under way after it, and giving back what gradients take."""

    step: Callable[[], None]
    drain: Callable[[], None]
    free: Callable[[], None]

    def rest(self) -> None:
        """Leave memory and the network to another side."""
        self.drain()
        self.free()


def rank() -> None:
    """Measure, as one of the ranks."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    peer = hocket.join()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    inputs = torch.randn(BATCH, WIDTH)
    sides, sessions = {}, []
    for name, strategy in SIDES.items():
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        session = hocket.attach(net, optimizer, hocket.compose(*strategy), peer=peer)
        sessions.append(session)
        sides[name] = Side(stepping(net, optimizer, inputs), session.settle, optimizer.zero_grad)

    seconds = medians(
        peer,
        [(name, lambda side=side: [side.step() for _ in range(STEPS)]) for name, side in sides.items()],
        REPEATS,
        before=lambda name: sides[name].step(),
        after=lambda name: sides[name].rest(),
    )
    allocated = {name: most_allocated(peer, side) for name, side in sides.items()}
    if peer.rank == 0:
        report(peer, {name: 1e3 * s / STEPS for name, s in seconds.items()}, allocated)
    for session in sessions:
        session.close()
    peer.close()


def stepping(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Callable[[], None]:
    """Return a function that makes a step."""

    def step() -> None:
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()

    return step


def most_allocated(peer: Peer, side: Side) -> float:
    """Return what NumPy and Python hold at most beyond what they had before two steps, in models, of any rank."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(2):
        side.step()
    side.rest()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return max(gather(peer, (peak - before) / (4 * LAYERS * WIDTH**2)))


def report(peer: Peer, ms: dict[str, float], allocated: dict[str, float]) -> None:
    """Print a table in markdown."""
    import torch

    print(f"{peer.size} ranks, torch {torch.__version__}")
    print("| side | ms per step | adds to local | step / sgp's | NumPy allocates, models |")
    print("|---|---:|---:|---:|---:|")
    for name, taken in ms.items():
        ratio = f"{taken / ms['sgp']:.2f}"
        print(f"| {name} | {taken:.1f} | {taken - ms['local']:.1f} | {ratio} | {allocated[name]:.3f} |")


if __name__ == "__main__":
    run_ranks(__file__, rank)
