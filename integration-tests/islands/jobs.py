"""The trainings of `cases.py` where each island is a job of its own, with a process group of torch's for itself."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import hocket
from islands.cases import CASES, batches_of, make, run
from islands.trained import shard

JOBS = 2


def main(folder: Path, names: list[str]) -> None:
    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    assert hocket.join().size == JOBS * size
    island = hocket.join().rank // size
    for name in names:
        case = CASES[name]
        model = shard(make(case, island), mesh, case.style)
        came_to = run(case, model, lambda session, case=case: batches_of(case, session.data_rank))
        if distributed.get_rank() == 0:
            torch.save(came_to, folder / f"{name}.{island}.pt")
