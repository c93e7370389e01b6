"""The base of every dataclass whose fields are configuration, and the allowed values of a type, in words."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from functools import cache, wraps
from typing import TYPE_CHECKING

from hocket.errors import ConfigError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS: dict[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    typing.Any: "any value",
}


class Configured:
    """The base of frozen dataclasses whose fields are configuration.

    A field that is an Enum takes a member or its value, in Python as in YAML, and holds the member. That comes before
    the subclass's own `__post_init__`.

    Raises:
        ConfigError: another value; names the class, the field and what is allowed.
    """

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        own = vars(cls).get("__post_init__")
        if own is not None:
            setattr(cls, "__post_init__", _after_conversion(own))  # noqa: B010 (mypy takes no assignment to it)

    def __post_init__(self) -> None:
        component: type = type(self)
        for name, hint in _choices(component):
            value = getattr(self, name)
            converted = _converted(component.__name__, name, hint, value)
            if converted is not value:
                object.__setattr__(self, name, converted)  # frozen, and still being built


def _after_conversion(own: Callable[..., None]) -> Callable[..., None]:
    @wraps(own)
    def post_init(self: Configured, *arguments: object, **named: object) -> None:
        Configured.__post_init__(self)
        own(self, *arguments, **named)

    return post_init


@cache
def _choices(component: type) -> tuple[tuple[str, object], ...]:
    """Return the fields that have an Enum in their types, with the types."""
    try:
        hints = typing.get_type_hints(component)
    except NameError as error:
        problem = f"has an annotation that cannot be evaluated at run time: {error}"
        raise ConfigError(f"{component.__name__} {problem}") from error
    names = [field.name for field in dataclasses.fields(component)]
    return tuple((name, hints[name]) for name in names if _enums(hints[name]))


def _enums(hint: object) -> list[type[Enum]]:
    return [part for part in _parts(hint) if issubclass(part, Enum)]


def _parts(hint: object) -> list[type]:
    """Return the classes in a union, or the type itself; generic ones with arguments are left out."""
    return [part for part in typing.get_args(hint) or (hint,) if isinstance(part, type)]


def _converted(component: str, name: str, hint: object, value: object) -> object:
    if isinstance(value, tuple(_parts(hint))):
        return value
    members = [member for enum in _enums(hint) for member in enum]
    for member in members:
        if value == member.value:
            return member
    near = suggest(str(value), [str(member.value) for member in members])
    raise ConfigError(f"{component}({name}={value!r}): {name} must be {allowed_by(hint)}.{near}")


def optional(hint: object) -> tuple[object, bool]:
    """Return a type without None, and whether None was in it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1 and len(rest) < len(typing.get_args(hint)):
            return rest[0], True
    return hint, False


def allowed_by(hint: object) -> str:
    """Return the values that a type allows, in words, such as `one of error, skip` or `an integer or null`."""
    choices, rest = choices_or(hint)
    if choices is not None:
        return f"{allowed_by(rest)} or {' or '.join(str(member.value) for member in choices)}"
    inner, nullable = optional(hint)
    if typing.get_origin(inner) is list:
        words = f"a list; each item is {allowed_by(typing.get_args(inner)[0])}"
    elif isinstance(inner, type) and issubclass(inner, Enum):
        words = "one of " + ", ".join(str(member.value) for member in inner)
    else:
        words = _WORDS.get(typing.get_origin(inner) or inner, str(inner))
    return f"{words} or null" if nullable else words


def choices_or(hint: object) -> tuple[type[Enum] | None, object]:
    """Split a union of an Enum and one other type; return None and the hint for another hint."""
    if isinstance(hint, types.UnionType) and type(None) not in typing.get_args(hint):
        choices = [arg for arg in typing.get_args(hint) if isinstance(arg, type) and issubclass(arg, Enum)]
        rest = [arg for arg in typing.get_args(hint) if arg not in choices]
        if len(choices) == len(rest) == 1:
            return choices[0], rest[0]
    return None, hint
