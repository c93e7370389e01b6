"""The islands of a run: ranks that share each replica, by FSDP2 or tensor parallelism. Imports no torch by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from hocket.errors import UserError
from hocket.launch.joining import join
from hocket.training.run import RunConfig

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from hocket.task import Task


def shard(
    model: nn.Module, run: RunConfig, task: Task, device: torch.device, evaluates: Callable[[], object]
) -> None:
    """Shard a model over the ranks of this rank's island, in place; collective over all ranks.

    Tensor parallelism splits what the task's plan names. FSDP2 gathers each layer of a `ModuleList` by itself, and all
    else with the model.

    Args:
        model: on `device`, with the same values on all ranks.
        run: the run's file.
        task: the run's, which gives the plan.
        device: this rank's.
        evaluates: calls the model, to find out whether it works when it is sharded.

    Raises:
        UserError: the model cannot be sharded; gives torch's reason.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from hocket.segment.shards import fsdp_modules
    from hocket.training.tensor_parallel import checked_plan

    island, mesh = run.island, _mesh(run, device)
    try:
        if island.tensor > 1:
            parallelize_module(model, mesh["tp"], checked_plan(run, task, model))
        if island.shard > 1:
            _shard_fully(model, mesh["replicate", "shard"] if island.replicate > 1 else mesh["shard"])
        evaluates()
        for module in fsdp_modules(model):
            module.reshard()  # what the evaluation has gathered hides the shards
    except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"island: the model of task {run.task.name} cannot be sharded; torch's reason: {reason}. Leave island "
            "out, or change the model"
        ) from error


def _shard_fully(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in reversed([*_layers(model)]):  # those within others first
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def leave_islands(run: RunConfig) -> None:
    """Leave the ranks' process group of torch, where the run has islands; collective."""
    if run.island.ranks > 1:
        from torch import distributed

        distributed.destroy_process_group()


def _mesh(run: RunConfig, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks, in a process group of torch that they join."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        join(torch_variables=True)
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=run.timeout_s))
    if distributed.get_rank():  # what torch warns of on all ranks is said once
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    island = run.island
    sizes = (distributed.get_world_size() // island.ranks, island.replicate, island.shard, island.tensor)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("island", "replicate", "shard", "tp"))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model that are gathered one by one: those of lists, which are called."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from (
                layer
                for layer in module
                if not isinstance(layer, nn.ModuleList | nn.ModuleDict)
                and any(True for _ in layer.parameters())
            )
