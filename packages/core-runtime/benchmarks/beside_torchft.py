"""DiLoCo between islands of FSDP2, by Hocket and by torchft: the same parameters, and the seconds of both.

    pip install torchft-nightly       # in an environment of its own, with Hocket
    python packages/core-runtime/benchmarks/beside_torchft.py [--width 1118] [--layers 20] [--every 4] [--rounds 7]
        [--row]

Two islands of two ranks on one host, each island a job of its own with Gloo inside, one thread a rank. Both sides train
the same model on the same batches, AdamW inside and Nesterov momentum outside, in the same processes and in turns. A
round is `--every` steps, the last of which exchanges; times are medians of the slowest rank's. The difference is the
largest of any parameter after all rounds, beside how far these have moved.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from measuring import free_port, medians
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import hocket

ISLANDS, RANKS, BATCH = 2, 2, 8


class Side:
    """A model that one of the two trains."""

    def __init__(self, given: argparse.Namespace, rank: int) -> None:
        self._given, self._rank, self._step = given, rank, 0
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Linear(given.width, given.width, bias=False) for _ in range(given.layers))
        )
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
        for part in (*self.model, self.model):
            fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def round(self) -> None:
        """Train up to the next exchange, and through it."""
        for _ in range(self._given.every):
            drawn = torch.Generator().manual_seed(ISLANDS * RANKS * self._step + self._rank)
            x = torch.randn(BATCH, self._given.width, generator=drawn)
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), x.roll(1, 1)).backward()
            self.optimizer.step()
            self._step += 1

    def whole(self) -> list[Tensor]:
        """Return the whole parameters."""
        return [p.full_tensor().detach() for p in self.model.parameters()]  # type: ignore[attr-defined]


def with_torchft(side: Side, given: argparse.Namespace) -> Callable[[], object]:
    """Have torchft exchange; return what ends it."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    outer = torch.optim.SGD(side.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=side.model.load_state_dict,
        state_dict=side.model.state_dict,
        min_replica_size=ISLANDS,
        use_async_quorum=False,
        init_sync=False,
        replica_id=os.environ["HOCKET_ISLAND"],
    )
    stack = ExitStack()
    stack.callback(manager.shutdown)
    stack.enter_context(DiLoCo(manager, [side.model], side.optimizer, outer, sync_every=given.every))
    return stack.close


def measure(given: argparse.Namespace) -> None:
    """Measure both, as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    peer = hocket.join()
    ours, theirs = Side(given, peer.rank), Side(given, peer.rank)
    first = ours.whole()
    strategy = hocket.compose("diloco", f"parameters.0.every={given.every}")
    session = hocket.attach(ours.model, ours.optimizer, strategy, peer=peer)
    end = with_torchft(theirs, given)
    taken = medians(peer, [("torchft", theirs.round), ("hocket", ours.round)], given.rounds)
    last, expected = ours.whole(), theirs.whole()
    apart = max(float((a - b).abs().max()) for a, b in zip(last, expected, strict=True))
    moved = max(float((a - b).abs().max()) for a, b in zip(last, first, strict=True))
    if peer.rank == 0 and given.row:
        own_s, other_s = taken["hocket"], taken["torchft"]
        what = f"| {ISLANDS * RANKS}, torch | round of {given.every} steps, {ISLANDS} islands of {RANKS} "
        print(
            f"{what}| `diloco` | {1e3 * own_s:.1f} | torchft | {1e3 * other_s:.1f} | {own_s / other_s:.2f} |"
        )
    elif peer.rank == 0:
        for name, seconds in taken.items():
            print(f"{name}: {1e3 * seconds:.0f} ms a round, {1e3 * seconds / given.every:.0f} ms a step")
        print(f"apart {apart:.1e}, moved {moved:.1e}, after {given.rounds + 1} rounds", flush=True)
    end()
    session.close()
    peer.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1118)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="that count, behind one to warm up")
    parser.add_argument("--row", action="store_true", help="print a row of tools/bench --against")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        measure(given)
        return
    from torchft._torchft import LighthouseServer  # type: ignore[import-not-found]

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=ISLANDS)
    meeting, ports = free_port(), [free_port() for _ in range(ISLANDS)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    common |= {
        "HOCKET_ISLANDS": str(ISLANDS),
        "HOCKET_MEET": f"127.0.0.1:{meeting}",
        "MASTER_ADDR": "127.0.0.1",
    }
    ranks = []
    for island, port in enumerate(ports):
        for rank in range(RANKS):
            own = {"HOCKET_ISLAND": str(island), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port)}
            ranks.append(subprocess.Popen([sys.executable, *sys.argv, "--rank"], env={**common, **own}))
    statuses = [each.wait() for each in ranks]
    lighthouse.shutdown()
    sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    main()
