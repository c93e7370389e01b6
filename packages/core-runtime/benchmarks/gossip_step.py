"""The time that gossip adds to a step: Hocket's dpsgd and sgp against the package decent-dp, same graphs.

    pip install --no-deps decent-dp loguru        # without its dependencies, torch stays as it is
    python packages/core-runtime/benchmarks/gossip_step.py [RANKS] [--transport torch|mpi]

Five linear layers of 2236 x 2236 (25 M parameters, 100 MB), batch 4, SGD, one thread per rank, all sides in one job, in
turns of some steps. Because both sides send during the step that follows, a turn begins with a step that is not
measured, and what is under way at its end is waited for outside of the measurement. RANKS must be a power of two, for
decent-dp. It uses Gloo, and hides what it sends behind the next step, as `delay: 1` does; its graphs are

- ring: pairs of neighbours, in every other step the other pairs. A model is sent per step and rank; dpsgd on its own
  graph sends two, on random_matching one, as decent-dp;
- one-peer-exp: pairs at distances 1, 2, 4, ...: a model per step and rank, as sgp.

At the end every side must have the weights of local training: all ranks have the same batch, so that averaging changes
nothing, and a side that left a step out would stand elsewhere.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from measuring import init_gloo, medians, run_ranks

import hocket

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hocket.transport.peer import Peer

WIDTH, LAYERS, BATCH = 2236, 5, 4
STEPS, REPEATS = 5, 7
LEARNING_RATE = 0.3  # large enough for the check of the weights

#: Hocket's sides: a name, the strategy and the graph of decent-dp's that sends as many bytes.
STRATEGIES = (
    ("dpsgd", ["dpsgd"], "ring"),
    ("dpsgd, delayed", ["dpsgd", "parameters.0.delay=1"], "ring"),
    ("matching, delayed", ["dpsgd", "parameters.0={topology: random_matching, delay: 1}"], "ring"),
    ("sgp", ["sgp"], "one-peer-exp"),
    ("overlap_sgp", ["overlap_sgp"], "one-peer-exp"),
)
DECENT_GRAPHS = ("ring", "one-peer-exp")


@dataclass
class Side:
    """A way to train.

    Attributes:
        net: what it trains, on this rank.
        step: makes a step.
        drain: waits for what is under way.
    """

    net: nn.Module
    step: Callable[[], object]
    drain: Callable[[], object] = lambda: None


def rank() -> None:
    """Measure, as one of the ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    peer = hocket.join()
    init_gloo(peer)
    seconds = measure(peer)
    if peer.rank == 0:
        report(peer, {name: 1e3 * s for name, s in seconds.items()})
    dist.destroy_process_group()
    peer.close()


def measure(peer: Peer) -> dict[str, float]:
    """Return each side's seconds of a step; torch.distributed is initialised."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    inputs = torch.randn(BATCH, WIDTH)

    def stepping(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()

    def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = copy.deepcopy(model)
        return net, sgd(net.parameters())

    net, optimizer = plain()
    sides = {"local": Side(net, lambda: stepping(net, optimizer))}
    sessions = []
    for name, strategy, _ in STRATEGIES:
        own_net, own_optimizer = plain()
        session = hocket.attach(own_net, own_optimizer, hocket.compose(*strategy), peer=peer)
        sessions.append(session)
        sides[name] = Side(
            own_net,
            lambda own_net=own_net, own_optimizer=own_optimizer: stepping(own_net, own_optimizer),
            session.settle,
        )
    for graph in DECENT_GRAPHS:
        sides[f"decent {graph}"] = decent_side(copy.deepcopy(model), graph, inputs)

    seconds = medians(
        peer,
        [(name, lambda side=side: [side.step() for _ in range(STEPS)]) for name, side in sides.items()],
        REPEATS,
        before=lambda name: sides[name].step(),
        after=lambda name: sides[name].drain(),
    )
    check_weights(model, sides)
    for session in sessions:
        session.close()
    return {name: s / STEPS for name, s in seconds.items()}


def sgd(parameters: object) -> torch.optim.Optimizer:
    """Return the optimizer that every side uses."""
    import torch

    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def decent_side(net: nn.Module, graph: str, inputs: torch.Tensor) -> Side:
    """Return decent-dp's way: its hooks step the optimizer, bucket by bucket, in backward."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.disable("decent_dp")
    wrapped = DecentralizedDataParallel(
        net, lambda named: sgd([parameter for _, parameter in named]), topology=graph
    )

    def drain() -> None:
        for work in wrapped._comm_ops:
            if work is not None:
                work.wait()

    return Side(net, lambda: wrapped(inputs).square().mean().backward(), drain)


def check_weights(start: nn.Module, sides: dict[str, Side]) -> None:
    """Exit unless every side's weights have come to where the local side's are, but for a thousandth of the way.

    A step more or less is about a hundredth.
    """
    wanted = _flat(sides["local"].net)
    way = (wanted - _flat(start)).norm()
    for name, side in sides.items():
        missed = (_flat(side.net) - wanted).norm() / way
        if not missed < 1e-3:
            sys.exit(f"gossip_step: {name} is {missed:.1%} of the way off: it does not train as local does")


def _flat(net: nn.Module) -> torch.Tensor:
    import torch

    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def report(peer: Peer, ms: dict[str, float]) -> None:
    """Print what each side takes and adds, and the ratio to decent-dp's side with the graph."""
    import torch

    local = ms["local"]
    print(f"{peer.size} ranks, torch {torch.__version__}, local step {local:.1f} ms")
    graphs = {name: graph for name, _, graph in STRATEGIES}
    for name, taken in ms.items():
        if name == "local":
            continue
        line = f"{name:>20}: {taken:7.1f} ms, adds {taken - local:7.2f} ms"
        if name in graphs:
            other = f"decent {graphs[name]}"
            line += f", {(taken - local) / (ms[other] - local):5.2f} of what {other} adds"
        print(line)


if __name__ == "__main__":
    if any(importlib.util.find_spec(name) is None for name in ("decent_dp", "loguru")):
        sys.exit("gossip_step: decent-dp is not installed: pip install --no-deps decent-dp loguru")
    run_ranks(__file__, rank)
