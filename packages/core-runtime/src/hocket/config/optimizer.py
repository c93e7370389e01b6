"""The optimizers of torch.optim by their lower-case names, and others as `module:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hocket.config.reference import Reference
from hocket.errors import suggest
from hocket.plugin.kinds import import_object

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["build_optimizer", "complete_arguments"]

_LEFT_OUT = ("params",)


def build_optimizer(reference: Reference, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Optimizer:
    """Build the optimizer that a config names.

    Args:
        params: parameters or parameter groups, as torch takes them.

    Raises:
        ConfigError: no such optimizer, no such argument, or a value that it refuses; names source and key.
    """
    optimizer = _find(reference)
    given = reference.check_arguments(optimizer, _LEFT_OUT)
    try:
        built: Optimizer = optimizer(params, **given)
    except (TypeError, ValueError) as error:
        written = ", ".join(f"{key}: {value}" for key, value in given.items())
        raise reference.where.error(f"{reference.name} refuses {written}: {error}") from error
    return built


def complete_arguments(reference: Reference) -> dict[str, Any]:
    """Return all keyword arguments of the optimizer, with its defaults, as plain values.

    Raises:
        ConfigError: as in `build_optimizer`.
    """
    return reference.complete_arguments(_find(reference), _LEFT_OUT)


def _find(reference: Reference) -> Any:
    """Return the class that a reference means."""
    import torch

    if ":" in reference.name:
        try:
            found = import_object(reference.name)
        except (ImportError, AttributeError, ValueError) as error:
            raise reference.name_location.error(
                f"cannot import the optimizer {reference.name!r}: {error}"
            ) from error
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
            raise reference.name_location.error(f"{reference.name!r} is no subclass of torch.optim.Optimizer")
        return found
    # LBFGS evaluates the loss several times in a step, which a run's training loop does not offer it.
    left_out = (torch.optim.Optimizer, torch.optim.LBFGS)
    optimizers = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value not in left_out
    }
    if reference.name not in optimizers:
        problem = f"there is no optimizer {reference.name!r}"
        allowed = f"{', '.join(sorted(optimizers))}, or one of your own as module:Class"
        raise reference.name_location.error(problem, allowed, suggest(reference.name, optimizers))
    return optimizers[reference.name]
