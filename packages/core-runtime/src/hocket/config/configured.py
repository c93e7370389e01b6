"""What every dataclass does whose fields are configuration: choices are members of their Enum, however it was built."""

from __future__ import annotations

import dataclasses
import typing
from enum import Enum
from functools import cache, wraps
from typing import Any

from hocket.config.schema import allowed_by
from hocket.errors import ConfigError, suggest

__all__ = ["Configured"]


class Configured:
    """Base of frozen dataclasses whose fields are configuration.

    A field that is an Enum takes a member or its value, in Python as in YAML, and holds the member. That comes before
    the subclass's own `__post_init__`.

    Raises:
        ConfigError: another value; names the class, the field and what is allowed.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
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


def _after_conversion(own: Any) -> Any:
    @wraps(own)
    def post_init(self: Configured, *arguments: Any, **named: Any) -> None:
        Configured.__post_init__(self)
        own(self, *arguments, **named)

    return post_init


@cache
def _choices(component: type) -> tuple[tuple[str, Any], ...]:
    """Return the fields that have an Enum in their types, with the types."""
    try:
        hints = typing.get_type_hints(component)
    except NameError as error:
        problem = f"has an annotation that cannot be evaluated at run time: {error}"
        raise ConfigError(f"{component.__name__} {problem}") from error
    names = [field.name for field in dataclasses.fields(component)]
    return tuple((name, hints[name]) for name in names if _enums(hints[name]))


def _enums(hint: Any) -> list[type[Enum]]:
    return [part for part in _parts(hint) if issubclass(part, Enum)]


def _parts(hint: Any) -> list[type]:
    """Return the classes of which a type is the union, or the type itself; not those with arguments of their own."""
    return [part for part in typing.get_args(hint) or (hint,) if isinstance(part, type)]


def _converted(component: str, name: str, hint: Any, value: Any) -> Any:
    if isinstance(value, tuple(_parts(hint))):
        return value
    members = [member for enum in _enums(hint) for member in enum]
    for member in members:
        if value == member.value:
            return member
    near = suggest(str(value), [str(member.value) for member in members])
    raise ConfigError(f"{component}({name}={value!r}): {name} must be {allowed_by(hint)}.{near}")
