"""The learning rate schedulers of torch.optim.lr_scheduler by their lower-case names, others as `module:Class`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from hocket.config.document import Location
from hocket.config.reference import Reference
from hocket.plain import Tree
from hocket.plugin.discovery import cause_of
from hocket.plugin.kinds import import_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

# A resumed run knows its last step from its checkpoint.
_LEFT_OUT = ("optimizer", "last_epoch")

#: The argument that is a list of schedulers, of SequentialLR and ChainedScheduler.
_SCHEDULERS = "schedulers"

#: The key, and its default, of ReduceLROnPlateau's metric: with torch, the caller gives its value in each step.
_METRIC, _DEFAULT_METRIC = "metric", "valid_loss"


def build_scheduler(reference: Reference, optimizer: Optimizer) -> LRScheduler:
    """Build the scheduler that a config names; its "epochs" are steps of the optimizer.

    Raises:
        ConfigError: no such scheduler, no such argument, or a value that it refuses; names source and key.
    """
    scheduler = _find(reference)
    given = _without_metric(reference, scheduler).check_arguments(scheduler, _LEFT_OUT)
    written = ", ".join(f"{key}: {value}" for key, value in given.items() if key != _SCHEDULERS)
    for key in given:
        if key == _SCHEDULERS:
            given[key] = [_build_nested(each, optimizer) for each in reference.nested_list(key)]
        elif "Callable" in str(inspect.signature(scheduler).parameters[key].annotation):
            given[key] = _functions(reference, key)
    try:
        built: LRScheduler = scheduler(optimizer=optimizer, **given)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise reference.where.error(
            f"{reference.name} refuses {written or 'no arguments'}: {error}"
        ) from error
    return built


def metric_of(reference: Reference) -> str | None:
    """Return the name of the metric by which a scheduler steps; None for one that counts steps.

    Raises:
        ConfigError: no such scheduler, or the metric is no name.
    """
    if not _takes_metric(_find(reference)):
        return None
    metric = reference.arguments.get(_METRIC, _DEFAULT_METRIC)
    if not isinstance(metric, str):
        raise reference.where.child(_METRIC).error(
            f"got {metric!r}", f"a metric's name, such as {_DEFAULT_METRIC}"
        )
    return metric


def complete_arguments(reference: Reference) -> Tree:
    """Return all keyword arguments of the scheduler that have a value, with torch's defaults, as plain values.

    Raises:
        ConfigError: as in `build_scheduler`.
    """
    scheduler = _find(reference)
    complete = _without_metric(reference, scheduler).complete_arguments(scheduler, _LEFT_OUT)
    if _SCHEDULERS in complete:
        nested = reference.nested_list(_SCHEDULERS)
        complete[_SCHEDULERS] = [{"name": each.name, **complete_arguments(each)} for each in nested]
    metric = metric_of(reference)
    return complete if metric is None else {_METRIC: metric, **complete}


def _build_nested(reference: Reference, optimizer: Optimizer) -> LRScheduler:
    if _takes_metric(_find(reference)):
        raise reference.where.error(
            f"{reference.name} steps by a metric, so it cannot be within another scheduler: put it into `schedulers` "
            "itself"
        )
    return build_scheduler(reference, optimizer)


def _takes_metric(scheduler: type[LRScheduler]) -> bool:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return issubclass(scheduler, ReduceLROnPlateau)


def _without_metric(reference: Reference, scheduler: type[LRScheduler]) -> Reference:
    return reference.without(_METRIC) if _takes_metric(scheduler) else reference


def _functions(reference: Reference, key: str) -> object:
    """Return the function that `module:function` names, or those of a list of such names."""
    given, where = reference.arguments[key], reference.where.child(key)
    if isinstance(given, list):
        return [_import(each, where) for each in given]
    return given if given is None else _import(given, where)


def _import(name: str, where: Location) -> Callable[..., object]:
    try:
        found: object = import_object(name)
    except (Exception, SystemExit) as error:  # whatever the module raises
        raise where.error(
            f"cannot import {name!r}: {cause_of(error)}", "a function as module:function"
        ) from error
    if not callable(found):
        raise where.error(f"{name!r} cannot be called", "a function as module:function")
    return found


def _find(reference: Reference) -> type[LRScheduler]:
    """Return the scheduler class that a reference names."""
    from torch.optim import lr_scheduler

    return reference.find_class("scheduler", lr_scheduler.LRScheduler, lr_scheduler)
