"""The optimizers of torch.optim by their lower-case names, their signatures being the schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hocket.config.reference import Reference
from hocket.errors import suggest

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["build_optimizer", "complete_arguments"]


def build_optimizer(reference: Reference, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Optimizer:
    """Build the optimizer that a config names.

    Args:
        params: parameters or parameter groups, as torch takes them.

    Raises:
        ConfigError: no such optimizer, no such argument, or a value that it refuses; names source and key.
    """
    optimizer, arguments = _check(reference)
    try:
        return optimizer(params, **arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
        raise reference.where.error(f"{reference.name} refuses {given}: {error}") from error


def complete_arguments(reference: Reference) -> dict[str, Any]:
    """Return all keyword arguments of the optimizer, with torch's defaults, as plain values.

    Raises:
        ConfigError: as in `build_optimizer`.
    """
    optimizer, arguments = _check(reference)
    complete = {name: p.default for name, p in _parameters(optimizer).items()} | arguments
    return {name: list(value) if isinstance(value, tuple) else value for name, value in complete.items()}


def _check(reference: Reference) -> tuple[Any, dict[str, Any]]:
    """Return the class and its arguments, with lists as the tuples that torch wants."""
    optimizers = _optimizers()
    optimizer = optimizers.get(reference.name)
    if optimizer is None:
        names = sorted(optimizers)
        problem = f"there is no optimizer {reference.name!r}"
        raise reference.name_location.error(problem, ", ".join(names), suggest(reference.name, names))
    parameters = _parameters(optimizer)
    arguments = {}
    for key, value in reference.arguments.items():
        where = reference.where.child(key)
        if key not in parameters:
            raise where.error(
                f"unknown argument of {reference.name}", ", ".join(parameters), suggest(key, parameters)
            )
        default = parameters[key].default
        numeric = isinstance(default, int | float) and not isinstance(default, bool)
        if numeric and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise where.error(f"got {where.given}", "a number")
        if isinstance(default, bool) and not isinstance(value, bool):
            raise where.error(f"got {where.given}", "true or false")
        arguments[key] = tuple(value) if isinstance(value, list) else value
    return optimizer, arguments


def _optimizers() -> dict[str, Any]:
    import torch

    # LBFGS evaluates the loss several times in a step, which a run's training loop does not offer it.
    left_out = (torch.optim.Optimizer, torch.optim.LBFGS)
    return {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value not in left_out
    }


def _parameters(optimizer: Any) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(optimizer).parameters)
    del parameters["params"]
    return parameters
