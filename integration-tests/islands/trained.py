"""The trainings of `cases.py` on sharded models: each island's first rank writes what its replica came to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from islands.cases import CASES, WIDE, batches_of, make, run


def main(folder: Path, names: list[str]) -> None:
    meshes: dict[tuple[tuple[str, ...], tuple[int, ...]], DeviceMesh] = {}
    rank, size = distributed.get_rank(), distributed.get_world_size()
    for name, case in (CASES | WIDE).items():
        if (names and name not in names) or math.prod(case.shape) != size:
            continue
        inside = INSIDE.get(case.style, ("shard",))
        if (inside, case.shape) not in meshes:
            world = init_device_mesh("cpu", case.shape, mesh_dim_names=("island", *inside))
            meshes[inside, case.shape] = world[inside]
        of_island = size // case.shape[0]
        island = rank // of_island
        model = shard(make(case, island), meshes[inside, case.shape], case.style)
        came_to = run(case, model, lambda session, case=case: batches_of(case, session.data_rank))
        if rank % of_island == 0:
            torch.save(came_to, folder / f"{name}.{island}.pt")


#: The names of an island's dimensions, by style.
INSIDE = {
    "tp": ("tp",),
    "sp": ("tp",),
    "hsdp": ("rep", "shard"),
    "fsdp tp": ("shard", "tp"),
    "fsdp sp": ("shard", "tp"),
}


def shard(model: nn.Module, mesh: DeviceMesh, style: str) -> nn.Module:
    """Shard a model over an island's mesh."""
    if style in ("tp", "sp"):
        return parallelize_module(model, mesh, plan_of(style))
    if style.startswith("fsdp "):
        parallelize_module(model, mesh["tp"], plan_of(style))
        mesh = mesh["shard"]
    options: dict[str, Any] = {"reshard_after_forward": False} if style == "kept" else {}
    if style != "root":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def plan_of(style: str) -> dict[str, Any]:
    """Return a plan of tensor parallelism, with the sequence sharded where the style says so."""
    if not style.endswith("sp"):
        names = ((f"blocks.{number}.up", f"blocks.{number}.down") for number in range(2))
        return {
            key: value
            for up, down in names
            for key, value in ((up, ColwiseParallel()), (down, RowwiseParallel()))
        }
    along = Shard(1)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    for number in range(2):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=along)
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=along)
    return plan
