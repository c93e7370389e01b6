"""What a session adds to a step of sharded models: FSDP2 alone, HSDP's own all-reduce, and Hocket between islands.

    python packages/core-runtime/benchmarks/islands.py [RANKS] [--island 2] [--width 1118] [--layers 20] [--repeats 9]
        [--sides fsdp hsdp agd diloco outer] [--transport torch]

Two islands of two ranks on one host by default, layers of `--width` squared parameters (20 of 1118: 25 M), one thread a
rank. `fsdp` shards over the island and exchanges nothing between islands; `hsdp` is FSDP2 on a mesh of two dimensions,
and computes what `agd` computes; `diloco` is a step without an exchange, and `outer` one of DiLoCo's outer steps. All
sides are in one job and take turns; times are medians of the slowest rank's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from measuring import init_gloo, medians, start_ranks

SIDES = ("fsdp", "hsdp", "agd", "diloco", "outer")
_NEVER = 1 << 20


def measure(given: argparse.Namespace) -> None:
    """Measure all sides, as one of the ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import hocket

    peer = hocket.join(given.transport)
    init_gloo(peer)
    mesh = init_device_mesh(
        "cpu", (peer.size // given.island, given.island), mesh_dim_names=("island", "shard")
    )
    batch = torch.randn(4, given.width, generator=torch.Generator().manual_seed(peer.rank))

    def make(side: str) -> tuple[Callable[[], None], hocket.Session | None]:
        """Return a side's step, and its session if it has one."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(given.width, given.width, bias=False) for _ in range(given.layers)))
        for layer in model:
            fully_shard(layer, mesh=mesh if side == "hsdp" else mesh["shard"])
        fully_shard(model, mesh=mesh if side == "hsdp" else mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        session = None
        if side not in ("fsdp", "hsdp"):
            every = {"diloco": [f"parameters.0.every={_NEVER}"], "outer": ["parameters.0.every=2"]}
            strategy = hocket.compose("diloco" if side == "outer" else side, *every.get(side, []))
            session = hocket.attach(model, optimizer, strategy, peer=peer)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step, session

    made = {side: make(side) for side in given.sides}
    taken = medians(
        peer,
        [(side, step) for side, (step, _) in made.items()],
        given.repeats,
        before=lambda side: made[side][0]() if side == "outer" else None,  # the inner step
    )
    if peer.rank == 0:
        values = given.layers * given.width**2
        print(
            f"{peer.size // given.island} islands of {given.island} ranks over {peer.transport}, {values / 1e6:.0f} M "
            f"parameters, torch {torch.__version__}: ms a step "
            + ", ".join(f"{side} {1e3 * seconds:.0f}" for side, seconds in taken.items()),
            flush=True,
        )
    for _, session in made.values():
        if session is not None:
            session.close()
    dist.destroy_process_group()
    peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="?", type=int, default=4)
    parser.add_argument("--island", type=int, default=2)
    parser.add_argument("--width", type=int, default=1118)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--transport", choices=("torch", "mpi"), default="torch")
    parser.add_argument("--rank", action="store_true", help="a launcher has started this process as a rank")
    given = parser.parse_args()
    if given.rank:
        measure(given)
        return
    program = [sys.executable, *sys.argv, "--rank"]
    start_ranks(program, given.ranks, given.transport)


if __name__ == "__main__":
    main()
