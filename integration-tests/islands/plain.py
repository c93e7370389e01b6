"""Plain scripts of torch's, without Hocket: DDP and FSDP2 train, and leave checkpoints in torch's own format."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def made(seed: int) -> nn.Sequential:
    """Return a network of the form of the digits' task: 64 inputs, layers whose rows two ranks do not share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 10))


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        model = made(0)
        if name == "fsdp2":
            for layer in (model[1], model[3], model):
                fully_shard(layer)
            wrapped: nn.Module = model
        else:
            wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(distributed.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            x, y = torch.randn(8, 1, 8, 8, generator=draw), torch.randint(0, 10, (8,), generator=draw)
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        if name == "ddp by its own names":
            state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
        else:
            state = {
                "model": get_model_state_dict(wrapped),
                "optimizer": get_optimizer_state_dict(wrapped, optimizer),
            }
        save(state, checkpoint_id=folder / name)
        whole = get_model_state_dict(
            wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if distributed.get_rank() == 0:
            torch.save(whole, folder / f"{name}.pt")
