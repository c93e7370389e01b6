"""A script that uses torch.distributed and DDP itself, before, during and after a session; prints one word if right."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from hocket.training.startup import defer_dynamo


def gradient_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(samples).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def main() -> None:
    if "joined" in sys.argv:
        hocket.join()  # who comes first serves the store
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hocket.attach(model, optimizer, "sgd") as session:
        assert (session.rank, session.size) == (rank, size)
        for step in range(3):
            samples = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            ours = gradient_of(model, samples)
            optimizer.step()
            assert torch.allclose(ours, gradient_of(ddp, samples), atol=1e-6)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        # Gloo's thread gives the last tensors back meanwhile. It hangs where the group goes first (torch 2.13).
        for _ in range(10):
            gradient_of(model, samples)
            optimizer.step()
    del ddp
    dist.destroy_process_group()
    if rank == 0:
        print("right", flush=True)


if __name__ == "__main__":
    defer_dynamo()
    main()
