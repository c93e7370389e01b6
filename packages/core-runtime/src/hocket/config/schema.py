"""Checks one value against a type, with OmegaConf's structured configs."""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hocket.config.document import Location
from hocket.configured import allowed_by, choices_or, optional

#: Lists whose elements are no lists.
_LISTS = (list[int], list[float], list[str])


def read_value(hint: object, where: Location) -> object:
    """Return the value at a place, converted to a type as OmegaConf converts it.

    Args:
        hint: a type that OmegaConf can hold: int, float, bool, str, an Enum (written by its values), lists and dicts
            of them, Optional of all these, Any; or one of them and an Enum, as in `int | Every`.
        where: the place of the value.

    Raises:
        ConfigError: the value is not of the type.
    """
    choices, rest = choices_or(hint)
    if choices is not None:
        member = next((member for member in choices if where.value == member.value), None)
        if member is not None:
            return member
    allowed, hint = allowed_by(hint), rest
    inner, _ = optional(hint)
    value = where.value
    if type(value) is inner:
        return value  # OmegaConf would say the same, ten times as slowly
    if isinstance(inner, type) and issubclass(inner, Enum):
        value = next((member for member in inner if value == member.value), value)
    schema = OmegaConf.structured(_schema(hint))
    try:
        # OmegaConf takes true for the integer 1; nobody who writes `every: true` means that.
        if isinstance(value, bool) and inner in (int, float):
            raise ValueError
        checked: Any = OmegaConf.to_object(OmegaConf.merge(schema, {"value": value}))
        # Nor does it mind lists among the integers of a list.
        if inner in _LISTS and any(isinstance(each, list | dict) for each in checked.value or ()):
            raise ValueError
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise where.error(f"got {where.given}", allowed) from error
    return checked.value


@cache
def _schema(hint: object) -> type:
    return dataclasses.make_dataclass("Value", [("value", hint)])
