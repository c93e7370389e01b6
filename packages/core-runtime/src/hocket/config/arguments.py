"""The keyword arguments of a class that is not Hocket's own, checked before the class would refuse them."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from hocket.config.reference import Reference
from hocket.errors import suggest

__all__ = ["check_arguments", "complete_arguments"]


def check_arguments(reference: Reference, called: Any, leave_out: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a reference as keyword arguments, lists as the tuples that torch wants.

    Args:
        called: the class that the reference means; its signature is the schema.
        leave_out: parameters that a config cannot give.

    Raises:
        ConfigError: there is no such argument, or a number or a truth value is none; names source and key.
    """
    parameters = _parameters(called, leave_out)
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
    return arguments


def complete_arguments(reference: Reference, called: Any, leave_out: Collection[str]) -> dict[str, Any]:
    """Return all keyword arguments that have a value, with the signature's defaults, as plain values.

    Args, Raises: as in `check_arguments`.
    """
    parameters = _parameters(called, leave_out)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    complete = defaults | check_arguments(reference, called, leave_out)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in complete.items()}


def _parameters(called: Any, leave_out: Collection[str]) -> dict[str, inspect.Parameter]:
    given = inspect.signature(called).parameters
    return {name: parameter for name, parameter in given.items() if name not in leave_out}
