"""A rank that trains by Fabric, and by a plain session, and tells whether both have the same parameters."""

from __future__ import annotations

import sys

import torch
from torch import nn

import hocket

sys.path.insert(0, sys.argv[1])
from fabric_loop import Fabric, HocketStrategy


def net() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.randn(4, 6, 5)


def by_fabric() -> list[torch.Tensor]:
    fabric = Fabric(accelerator="cpu", strategy=HocketStrategy("sgd"))
    fabric.launch()
    plain, optimizer, batches = net()
    model, stepping = fabric.setup(plain, optimizer)
    for batch in batches + fabric.global_rank:
        stepping.zero_grad()
        fabric.backward(model(batch).square().mean())
        stepping.step()
    assert fabric.broadcast(fabric.global_rank, src=1) == 1
    assert fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum") == 1
    assert fabric.all_reduce(torch.tensor(float(fabric.global_rank))) == 0.5
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == [0, 1]
    fabric.barrier()
    fabric.strategy.session.close()
    return [each.detach().clone() for each in plain.parameters()]


def by_session() -> list[torch.Tensor]:
    model, optimizer, batches = net()
    with hocket.attach(model, optimizer, "sgd") as session:
        for batch in batches + session.rank:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


print("same" if all(map(torch.equal, by_fabric(), by_session())) else "different", flush=True)
