"""Check one value against a type with OmegaConf's structured configs, and say in words what a type allows."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hocket.config.document import Location

__all__ = ["allowed_by", "optional", "read_value"]

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}


def optional(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether None was in it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1 and len(rest) < len(typing.get_args(hint)):
            return rest[0], True
    return hint, False


def allowed_by(hint: Any) -> str:
    """Return what a type allows, in words, for instance `one of error, skip` or `an integer or null`."""
    choices, rest = _choices_or(hint)
    if choices is not None:
        return f"{allowed_by(rest)} or {' or '.join(str(member.value) for member in choices)}"
    inner, nullable = optional(hint)
    if typing.get_origin(inner) is list:
        words = f"a list, of which each is {allowed_by(typing.get_args(inner)[0])}"
    elif isinstance(inner, type) and issubclass(inner, Enum):
        words = "one of " + ", ".join(str(member.value) for member in inner)
    else:
        words = _WORDS.get(typing.get_origin(inner) or inner, str(inner))
    return f"{words} or null" if nullable else words


def read_value(hint: Any, where: Location) -> Any:
    """Return what stands at a place, converted to a type as OmegaConf converts it.

    Args:
        hint: what OmegaConf can hold: int, float, bool, str, an Enum (written by its values), lists and dicts
            of them, Optional of all these, Any; or one of them and an Enum, as in `int | Every`.

    Raises:
        ConfigError: what stands there is not of the type.
    """
    choices, rest = _choices_or(hint)
    if choices is not None:
        member = next((member for member in choices if where.value == member.value), None)
        if member is not None:
            return member
    allowed, hint = allowed_by(hint), rest
    inner, _ = optional(hint)
    value = where.value
    if isinstance(inner, type) and issubclass(inner, Enum):
        value = next((member for member in inner if value == member.value), value)
    schema = OmegaConf.structured(_schema(hint))
    try:
        # OmegaConf takes true for the integer 1; nobody who writes `every: true` means that.
        if isinstance(value, bool) and inner in (int, float):
            raise ValueError
        checked: Any = OmegaConf.to_object(OmegaConf.merge(schema, {"value": value}))
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise where.error(f"got {where.given}", allowed) from error
    return checked.value


def _choices_or(hint: Any) -> tuple[type[Enum] | None, Any]:
    """Split a union of an Enum and one other type; return None and the hint where it is none."""
    if isinstance(hint, types.UnionType) and type(None) not in typing.get_args(hint):
        choices = [arg for arg in typing.get_args(hint) if isinstance(arg, type) and issubclass(arg, Enum)]
        rest = [arg for arg in typing.get_args(hint) if arg not in choices]
        if len(choices) == len(rest) == 1:
            return choices[0], rest[0]
    return None, hint


@cache
def _schema(hint: Any) -> type:
    return dataclasses.make_dataclass("Value", [("value", hint)])
