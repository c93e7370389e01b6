"""Tensor parallelism within a run's islands: a task's plan of it, checked without ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from torch import nn

from hocket.errors import CompositionError
from hocket.task import Task
from hocket.training.run import RunConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.parallel import ParallelStyle


def checked_plan(run: RunConfig, task: Task, model: nn.Module) -> dict[str, ParallelStyle]:
    """Return a task's plan of tensor parallelism, for the islands of a run.

    Raises:
        CompositionError: the task has no plan for so many ranks, or its parameters do not divide evenly.
    """
    ranks = run.island.tensor
    try:
        plan = {**task.tensor_plan(model, ranks)}
        if not plan:
            raise ValueError(
                "there is no plan of tensor parallelism for its model: leave tensor out, or give the task "
                "a tensor_plan, as in task {name: bible, network: transformer}"
            )
        parameters = dict(model.named_parameters())
        for name, dim in _dimensions(plan, model).items():
            if parameters[name].shape[dim] % ranks:
                raise ValueError(
                    f"parameter {name} of shape {list(parameters[name].shape)} does not divide evenly along its "
                    f"dimension {dim}: choose another number, or leave the parameter out of the task's tensor_plan"
                )
    except ValueError as error:
        raise CompositionError(f"task {run.task.name} cannot use island.tensor={ranks}: {error}") from error
    return plan


def ranks_of_parameters(run: RunConfig, task: Task, model: nn.Module) -> dict[str, int]:
    """Return by name the number of an island's ranks among which each parameter of a run's model is divided."""
    split = _dimensions(checked_plan(run, task, model), model) if run.island.tensor > 1 else {}
    return {
        name: run.island.shard * (run.island.tensor if name in split else 1)
        for name, _ in model.named_parameters()
    }


def step_each_by_itself(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Have optimizers step parameter by parameter, unless told otherwise.

    Tensor parallelism leaves some parameters whole or on another mesh, and torch refuses such mixed lists of tensors,
    which it would use on GPUs.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False


def refuse_lists(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that are told to step lists of tensors.

    Raises:
        CompositionError: names the setting.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for name in ("foreach", "fused"):
            if group.get(name):
                raise CompositionError(
                    f"optimizer.{name}: with {name}, torch cannot update tensor-parallel parameters and unsplit ones "
                    f"in the same step: leave {name} out"
                )


def _dimensions(plan: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, int]:
    """Return by name the dimension along which each parameter is split; those that stay whole are left out.

    Raises:
        ValueError: the plan names a module that the model does not have.
    """
    found = {}
    for path, style in plan.items():
        matching = [(name, module) for name, module in model.named_modules() if _matches(path, name)]
        if not matching:
            raise ValueError(f"its tensor_plan names {path!r}, but the model has no such module")
        for name, module in matching:
            for own, _ in module.named_parameters(recurse=False):
                dim = _dimension(style, module, own)
                if dim is not None:
                    found[f"{name}.{own}".lstrip(".")] = dim
    return found


def _matches(path: str, name: str) -> bool:
    """Return whether a plan's path, whose parts may be patterns, names a module."""
    parts, names = path.split("."), name.split(".")
    return len(parts) == len(names) and all(map(fnmatch, names, parts))


def _dimension(style: ParallelStyle, module: nn.Module, own: str) -> int | None:
    """Return the dimension along which a style splits a module's own parameter, None for none."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    embeds = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return 1 if embeds else 0
    if isinstance(style, RowwiseParallel):
        return 0 if embeds else 1 if own == "weight" else None
    return None
