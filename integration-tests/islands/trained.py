"""The trainings of `cases.py` on sharded models: each island's first rank writes what its replica came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from islands.cases import CASES, batches_of, make, run


def main(folder: Path, names: list[str]) -> None:
    meshes: dict[str, DeviceMesh] = {}
    rank, size = distributed.get_rank(), distributed.get_world_size()
    for name, case in CASES.items():
        if names and name not in names:
            continue
        inside = "tp" if case.style == "tp" else "shard"
        shape = (size // case.shape[1], case.shape[1])
        if inside not in meshes:
            meshes[inside] = init_device_mesh("cpu", shape, mesh_dim_names=("island", inside))[inside]
        island = rank // shape[1]
        model = shard(make(case, island), meshes[inside], case.style)
        came_to = run(case, model, lambda session, case=case: batches_of(case, session.data_rank))
        if rank % shape[1] == 0:
            torch.save(came_to, folder / f"{name}.{island}.pt")


def shard(model: nn.Module, mesh: DeviceMesh, style: str) -> nn.Module:
    """Shard a model over an island's mesh."""
    if style == "tp":
        plan: dict[str, Any] = {}
        for number in range(2):
            plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    reshards = False if style == "kept" else None
    if style != "root":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return model
