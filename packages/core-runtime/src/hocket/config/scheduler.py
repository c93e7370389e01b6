"""The learning rate schedulers of torch.optim.lr_scheduler by their lower-case names."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hocket.config.reference import Reference
from hocket.errors import suggest

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

__all__ = ["build_scheduler", "complete_arguments"]

# A resumed run knows its last step from its checkpoint.
_LEFT_OUT = ("optimizer", "last_epoch")

# Made of functions or of other schedulers, or stepped with a metric, which a config cannot give them.
_NOT_CONFIGURABLE = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")


def build_scheduler(reference: Reference, optimizer: Optimizer) -> LRScheduler:
    """Build the scheduler that a config names; its "epochs" are steps.

    Raises:
        ConfigError: no such scheduler, no such argument, or a value that it refuses; names source and key.
    """
    scheduler = _find(reference)
    given = reference.check_arguments(scheduler, _LEFT_OUT)
    try:
        built: LRScheduler = scheduler(optimizer, **given)
    except (TypeError, ValueError) as error:
        written = ", ".join(f"{key}: {value}" for key, value in given.items()) or "no arguments"
        raise reference.where.error(f"{reference.name} refuses {written}: {error}") from error
    return built


def complete_arguments(reference: Reference) -> dict[str, Any]:
    """Return all keyword arguments of the scheduler that have a value, with torch's defaults, as plain values.

    Raises:
        ConfigError: as in `build_scheduler`.
    """
    return reference.complete_arguments(_find(reference), _LEFT_OUT)


def _find(reference: Reference) -> Any:
    """Return the class that a reference means."""
    from torch.optim import lr_scheduler

    schedulers = {
        name.lower(): value
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and not name.startswith("_")
        and name not in ("LRScheduler", *_NOT_CONFIGURABLE)
    }
    if reference.name not in schedulers:
        problem = f"there is no scheduler {reference.name!r}"
        raise reference.name_location.error(
            problem, ", ".join(sorted(schedulers)), suggest(reference.name, schedulers)
        )
    return schedulers[reference.name]
