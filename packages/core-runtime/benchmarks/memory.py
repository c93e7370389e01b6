"""The memory that training takes beside parameters: alone, with DDP on Gloo, and with each recipe, against the plan.

    python packages/core-runtime/benchmarks/memory.py [SIDE]... [--ranks N] [--layers N] [--island N]

Linear layers of 2236 x 2236 (20: 100 M parameters, 400 MB), SGD without momentum, one thread a rank. Each side is a
job of ranks over transport torch on one host: `alone`, `ddp` or a recipe, by default all. Parameters are exchanged
every eight steps where a recipe does so more rarely. Memory is a rank's share of what processes have in memory (Pss),
the most that was seen in ten steps, less that before attach; a small model has been trained before, so that programs
and their libraries are loaded. What is expected is the gradients, and what `hocket plan` says; where gradients are
exchanged, they lie in its buffers.

With `--island` FSDP2 shards the model over so many ranks, and `alone` exchanges nothing between such islands.
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING

from measuring import init_gloo, start_ranks

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from hocket import Session
    from hocket.strategy.strategy import Strategy
    from hocket.transport.peer import Peer

WIDTH, BATCH, STEPS, EVERY, MB = 2236, 4, 10, 8, 1e6
_PERIOD_S = 0.02
# With this malloc gives large tensors back to the system when they are freed.
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


class Watch(threading.Thread):
    """A watch on this process's memory, until it is ended."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._end = threading.Event()
        self.most = self.before = self._used()
        self.start()

    @staticmethod
    def _used() -> int:
        with open("/proc/self/smaps_rollup") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    def run(self) -> None:
        while not self._end.wait(_PERIOD_S):
            self.most = max(self.most, self._used())

    def end(self) -> int:
        """Return the bytes that were added at most."""
        self._end.set()
        self.join()
        return self.most - self.before


def composed(recipe: str) -> Strategy:
    """Return a recipe's strategy, whose parameters are exchanged in these few steps."""
    import hocket

    strategy = hocket.compose(recipe)
    rare = [i for i, each in enumerate(strategy.parameters) if each.period(2) > EVERY]
    return hocket.compose(recipe, *(f"parameters.{i}.every={EVERY}" for i in rare))


def make(width: int, layers: int, mesh: DeviceMesh | None) -> nn.Module:
    """Return a model of so many layers, sharded over a mesh if there is one."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for part in () if mesh is None else (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def train(side: str, model: nn.Module, peer: Peer) -> Session | None:
    """Train a model on one side; return the side's session."""
    import torch
    from torch import nn

    import hocket

    net, session = model, None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if side == "ddp":
        net = nn.parallel.DistributedDataParallel(model)
    elif side != "alone":
        session = hocket.attach(model, optimizer, composed(side), peer=peer)
    inputs = torch.randn(BATCH, next(model.parameters()).shape[0])
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
    return session


def rank(side: str, layers: int, island: int) -> None:
    """Measure one side, as one of the ranks."""
    import hocket

    peer = hocket.join("torch")
    if side == "ddp" or island > 1:
        init_gloo(peer)
    mesh = mesh_of(peer.size, island) if island > 1 else None
    small = train(side, make(WIDTH // 4, layers, mesh), peer)
    if small is not None:
        small.close()
    model = make(WIDTH, layers, mesh)
    watch = Watch()
    session = train(side, model, peer)
    added, expected = watch.end(), expected_bytes(side, model, peer.size, island)
    if peer.rank == 0:
        print(f"| {side} | {added / MB:,.0f} | {expected / MB:,.0f} | {added / expected:.2f} |", flush=True)
    if session is not None:
        session.close()
    peer.close()


def mesh_of(ranks: int, island: int) -> DeviceMesh:
    """Return the mesh of this rank's island."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ranks // island, island), mesh_dim_names=("island", "shard"))["shard"]


def expected_bytes(side: str, model: nn.Module, ranks: int, island: int) -> int:
    """Return the bytes of gradients and buffers, those of shards in islands."""
    from hocket.plan.plan import plan
    from hocket.transport.host.memory import SMALLEST_BYTES
    from hocket.transport.network import NetworkModel

    gradients = sum(p.nbytes for p in model.parameters()) // island
    if side in ("alone", "ddp"):
        return gradients * (1 + (side == "ddp"))
    strategy = composed(side)
    planned = plan(
        strategy, model, ranks // island, NetworkModel(), shared_bytes=SMALLEST_BYTES, island=island
    )
    return planned.memory_bytes + (0 if strategy.gradients else gradients)


def recipes() -> list[str]:
    """Return the recipes of the installed plugins, but for those of pipelines."""
    from hocket.plugin import default_registry

    registry = default_registry()
    registry.load_installed()
    return [recipe.name for recipe in registry.recipes() if not recipe.name.startswith("eapipe")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sides", nargs="*", metavar="SIDE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument(
        "--island", type=int, default=1, help="ranks of an island; four ranks make two islands of 2"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(given.sides[0], given.layers, given.island)
        return
    print("| side | adds, MB | expected, MB | ratio |\n|---|---:|---:|---:|", flush=True)
    for side in given.sides or ["alone", "ddp", *recipes()]:
        program = [
            sys.executable,
            __file__,
            side,
            f"--layers={given.layers}",
            f"--island={given.island}",
            "--rank",
        ]
        start_ranks(program, given.ranks, "torch", _VARIABLES)


if __name__ == "__main__":
    main()
