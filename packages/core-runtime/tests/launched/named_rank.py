"""A script whose ranks are named to torch.distributed; prints one word if right."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import hocket


def main() -> None:
    peer = hocket.join(torch_variables=True)
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE")] == [str(peer.rank), str(peer.size)]
    assert hocket.join() is peer  # of the same job as before
    dist.init_process_group("gloo")
    total = torch.full((1,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    assert total.item() == peer.size * (peer.size + 1) / 2
    if peer.rank == 0:
        print("right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
