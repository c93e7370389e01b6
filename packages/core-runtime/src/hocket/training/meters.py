"""Torchmetrics' objects in an evaluation by several ranks; torchmetrics itself is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.errors import ConfigError
from hocket.task import Task

__all__ = ["Meter", "Value", "meters_of", "value_of"]

#: What a metric is: a number, or several in lists and mappings.
Value = float | list[Any] | dict[str, Any]

#: Returns every rank's tensor, by rank.
Gather = Callable[[Tensor], list[Tensor]]

_ASKED = ("update", "compute", "reset", "clone", "modules")


class Meter(Protocol):
    """The part of `torchmetrics.Metric` that is used here."""

    def update(self, output: Any, target: Any) -> None:
        """Take in a batch."""

    def compute(self) -> Any:
        """Return the metric of all that was taken in."""

    def reset(self) -> None:
        """Forget what was taken in."""

    def to(self, device: torch.device) -> Meter:
        """Move to a device."""

    def clone(self) -> Meter:
        """Return an equal one."""

    def modules(self) -> Iterable[Any]:
        """Return it and those within it."""


def meters_of(task: Task, gather: Gather | None) -> dict[str, Meter]:
    """Return copies of a task's torchmetrics objects that have seen nothing.

    Args:
        task: whose.
        gather: makes each one's value that of all ranks' samples; None for those of this rank alone.

    Raises:
        ConfigError: the task gives something else, or takes the name of the loss.
    """
    given: Any = task.torchmetrics()
    if not callable(getattr(given, "items", None)):
        raise ConfigError(f"{_told(task)} is {given!r}; allowed: torchmetrics objects by name, in a dict")
    return {str(name): _prepared(task, str(name), meter, gather) for name, meter in given.items()}


def _prepared(task: Task, name: str, given: Any, gather: Gather | None) -> Meter:
    if name == "loss":
        raise ConfigError(
            f"{_told(task)}: a metric is named 'loss', as the task's loss is: give it another name"
        )
    if isinstance(given, type) or not all(callable(getattr(given, asked, None)) for asked in _ASKED):
        raise ConfigError(f"{_told(task)}: {name!r} is {given!r}; allowed: a torchmetrics object")
    meter: Meter = given.clone()
    meter.reset()
    for each in meter.modules():
        each.distributed_available_fn = lambda: gather is not None
        each.dist_sync_fn = None if gather is None else lambda tensor, group=None: gather(tensor)
    return meter


def value_of(computed: Any) -> Value:
    """Return what a metric computed as plain numbers."""
    if isinstance(computed, Tensor):
        value: Value = computed.tolist()
        return value
    if isinstance(computed, Mapping):
        return {str(key): value_of(each) for key, each in computed.items()}
    if isinstance(computed, list | tuple):
        return [value_of(each) for each in computed]
    return float(computed)


def _told(task: Task) -> str:
    return f"what torchmetrics() of task {type(task).__name__} returns"
