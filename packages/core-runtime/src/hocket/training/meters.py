"""Torchmetrics' objects in an evaluation by several ranks; torchmetrics itself is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from hocket.errors import ConfigError
from hocket.plain import Batch
from hocket.task import Task

#: The value of a metric: a number, or several in lists and mappings.
Value: TypeAlias = "float | list[Value] | dict[str, Value]"

#: A metric as torchmetrics computes it.
Computed: TypeAlias = "SupportsFloat | Mapping[str, Computed] | list[Computed] | tuple[Computed, ...]"

#: Returns every rank's tensor, by rank.
Gather = Callable[[Tensor], list[Tensor]]

_ASKED = ("update", "compute", "reset", "clone", "modules")


class Meter(Protocol):
    """The part of `torchmetrics.Metric` that is used here."""

    distributed_available_fn: Callable[[], bool] | None
    dist_sync_fn: Callable[..., list[Tensor]] | None

    def update(self, output: Batch, target: Batch) -> None:
        """Add a batch."""

    def compute(self) -> Computed:
        """Return the metric over all batches added."""

    def reset(self) -> None:
        """Forget all batches."""

    def to(self, device: torch.device) -> Meter:
        """Move to a device."""

    def clone(self) -> Meter:
        """Return an equal one."""

    def modules(self) -> Iterable[Meter]:
        """Return the metric and those within it."""


def meters_of(task: Task, gather: Gather | None) -> dict[str, Meter]:
    """Return fresh copies of a task's torchmetrics objects.

    Args:
        task: the task.
        gather: returns every rank's tensor, so that a metric covers all ranks' samples; None for this rank's alone.

    Raises:
        ConfigError: the task returns something else, or names a metric `loss`.
    """
    given = task.torchmetrics()
    if not callable(getattr(given, "items", None)):
        raise ConfigError(
            f"{_source(task)} returned {given!r}; allowed: torchmetrics objects by name, in a dict"
        )
    return {str(name): _prepared(task, str(name), meter, gather) for name, meter in given.items()}


def _prepared(task: Task, name: str, given: Meter, gather: Gather | None) -> Meter:
    if name == "loss":
        raise ConfigError(
            f"{_source(task)}: a metric is named 'loss', the name of the task's loss: give it another name"
        )
    if isinstance(given, type) or not all(callable(getattr(given, asked, None)) for asked in _ASKED):
        raise ConfigError(f"{_source(task)}: {name!r} is {given!r}; allowed: a torchmetrics object")
    meter = given.clone()
    meter.reset()
    for each in meter.modules():
        each.distributed_available_fn = lambda: gather is not None
        each.dist_sync_fn = None if gather is None else lambda tensor, group=None: gather(tensor)
    return meter


def value_of(computed: Computed) -> Value:
    """Return a metric's computed value as plain numbers."""
    if isinstance(computed, Tensor):
        value: Value = computed.tolist()
        return value
    if isinstance(computed, Mapping):
        return {str(key): value_of(each) for key, each in computed.items()}
    if isinstance(computed, list | tuple):
        return [value_of(each) for each in computed]
    return float(computed)


def _source(task: Task) -> str:
    return f"torchmetrics() of task {type(task).__name__}"
