"""What one would use in place of Hocket, in one table of ratios: Gloo, MPI, DDP, HSDP, decent-dp and torchft.

    tools/bench --against [--ranks 2 4] [--transport torch|mpi] [--only sums steps islands gossip outer]
    sudo tools/netlab --hosts 4 --rate 1gbit run --env -- \\
        .venv/bin/python packages/core-runtime/benchmarks/against.py --rank --transport torch

The first line measures ranks of one host; the second is a rank of a job over hosts. All sides of a row take turns in
one job, and a figure is the slowest rank's, the median of the turns. Islands are measured from 4 ranks on. A row whose
package is not installed is skipped with a line on standard error.

- `sums`: the sum of 100 MB; beside it, what copies of as many bytes take with all ranks copying at once.
- `steps`: a step of two models by the sizes of their tensors, with 50 ms of an accelerator's time (`against_ddp.py`).
- `islands`: a step of a model that FSDP2 shards over two ranks, averaged over the others by a strategy or by HSDP.
- `gossip`: what an exchange adds to a step (`gossip_step.py`).
- `outer`: a round of DiLoCo between two islands of two ranks, on one host (`beside_torchft.py`).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from measuring import init_gloo, medians, start_ranks

if TYPE_CHECKING:
    from torch import nn

    from hocket.transport.peer import Peer

SUM_BYTES, TURNS = 100_000_000, 9
STEP_MODELS, STEP_RECIPES, COMPUTE_S, STEPS_S = ("vgg", "resnet"), ("agd", "sgd"), 0.05, 6.0
WIDTH, LAYERS, BATCH = 2236, 5, 4
_HEAD = "| ranks, transport | what | Hocket | ms | instead | ms | ratio |\n|---|---|---|---:|---|---:|---:|"


class Row(NamedTuple):
    """A comparison: what is done, and by whom in how many seconds."""

    what: str
    own: str
    own_s: float
    other: str
    other_s: float


def sums(peer: Peer) -> Iterator[Row]:
    """Compare sums of one long vector, in place."""
    import numpy as np
    import torch
    import torch.distributed as dist

    data = peer.memory.allocate(SUM_BYTES).view(np.float32)
    beside, tensor = np.zeros_like(data), torch.zeros(len(data))
    data[:] = 0
    lane = peer.lane("sum", SUM_BYTES)
    sides: list[tuple[str, Callable[[], object]]] = [
        ("hocket", lambda: lane.iallreduce(data, data).wait()),
        ("Gloo", lambda: dist.all_reduce(tensor)),
        ("copies", lambda: np.copyto(beside, data)),
    ]
    if peer.transport == "mpi":
        from mpi4py import MPI

        sides.append(("MPI_Allreduce", partial(MPI.COMM_WORLD.Dup().Allreduce, data, beside)))
    taken = medians(peer, sides, TURNS)
    lane.close()
    for name, _ in sides[1:]:
        yield Row("sum of 100 MB", "lane, in place", taken["hocket"], name, taken[name])


def steps(peer: Peer) -> Iterator[Row]:
    """Compare steps of replicas."""
    from against_ddp import MODELS, measure

    options = argparse.Namespace(recipes=STEP_RECIPES, compute_s=COMPUTE_S, seconds=STEPS_S)
    for name in STEP_MODELS:
        taken = measure(peer, MODELS[name], options)
        for recipe in STEP_RECIPES:
            yield Row(f"step, {name}", f"`{recipe}`", taken[recipe], "DDP on Gloo", taken["ddp"])


def islands(peer: Peer) -> Iterator[Row]:
    """Compare steps of replicas that are shards on two ranks each."""
    if peer.size < 4 or peer.size % 2:
        return
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import hocket

    mesh = init_device_mesh("cpu", (peer.size // 2, 2), mesh_dim_names=("island", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    inputs = torch.randn(BATCH, WIDTH)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()

    sides, sessions = [], []
    for name in ("HSDP", *STEP_RECIPES):
        net: nn.Module = copy.deepcopy(model)
        for layer in net.children():
            fully_shard(layer, mesh=mesh if name == "HSDP" else mesh["shard"])
        fully_shard(net, mesh=mesh if name == "HSDP" else mesh["shard"])
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        if name != "HSDP":
            sessions.append(hocket.attach(net, optimizer, name, peer=peer))
        sides.append((name, partial(step, net, optimizer)))
    taken = medians(peer, sides, 2, in_a_row=6)
    for session in sessions:
        session.close()
    for recipe in STEP_RECIPES:
        yield Row("step of shards", f"`{recipe}` between islands", taken[recipe], "HSDP", taken["HSDP"])


def gossip(peer: Peer) -> Iterator[Row]:
    """Compare what gossip adds to a step."""
    if peer.size & (peer.size - 1):
        return
    from gossip_step import STRATEGIES, measure

    taken = measure(peer)
    for name, _, graph in STRATEGIES:
        other = f"decent {graph}"
        yield Row(
            "gossip adds", f"`{name}`", taken[name] - taken["local"], other, taken[other] - taken["local"]
        )


PARTS: dict[str, Callable[[Peer], Iterator[Row]]] = {
    "sums": sums,
    "steps": steps,
    "islands": islands,
    "gossip": gossip,
}
OUTER = "outer"
# The packages of a part, and the arguments of pip that install them.
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "gossip": (("decent_dp", "loguru"), "--no-deps decent-dp loguru"),
    OUTER: (("torchft",), "torchft-nightly"),
}


def installed(parts: Sequence[str]) -> list[str]:
    """Return the parts whose packages are installed; print a line for each of the others."""
    found = []
    for part in parts:
        packages, wanted = _NEEDS.get(part, ((), ""))
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            print(f"{part}: skipped: {missing[0]} is not installed: pip install {wanted}", file=sys.stderr)
        else:
            found.append(part)
    return found


def rank(transport: str, parts: Sequence[str]) -> None:
    """Measure, as one of the ranks."""
    import torch
    import torch.distributed as dist

    import hocket

    torch.set_num_threads(1)
    peer = hocket.join(transport)
    init_gloo(peer)
    for part in (part for part in parts if part != OUTER):
        for row in PARTS[part](peer):
            cells = (row.what, row.own, f"{1e3 * row.own_s:.1f}", row.other, f"{1e3 * row.other_s:.1f}")
            if peer.rank == 0:
                line = (
                    f"| {peer.size}, {peer.transport} | {' | '.join(cells)} | {row.own_s / row.other_s:.2f} |"
                )
                print(line, flush=True)
    dist.destroy_process_group()
    peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--transport", choices=("torch", "mpi"), help="by default each that is installed")
    parts = [*PARTS, OUTER]
    parser.add_argument("--only", nargs="+", default=parts, choices=parts)
    parser.add_argument("--rank", action="store_true", help="a launcher has started this process as a rank")
    given = parser.parse_args()
    only = installed(given.only)
    if given.rank:
        rank(given.transport or "torch", only)
        return
    print(_HEAD, flush=True)
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    for transport in [given.transport] if given.transport else ["torch", "mpi"][: 1 + has_mpi]:
        program = [sys.executable, __file__, "--rank", "--transport", transport, "--only", *only]
        for size in given.ranks if set(only) - {OUTER} else ():
            start_ranks(program, size, transport)
    if OUTER in only:
        beside = Path(__file__).with_name("beside_torchft.py")
        sys.exit(subprocess.run([sys.executable, beside, "--row"], check=False).returncode)


if __name__ == "__main__":
    main()
