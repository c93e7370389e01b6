"""Choices among words, of every component that is registered: in Python as in YAML, and nothing else."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
from matrix import everything, example_of

from hocket.collective.allreduce import Allreduce
from hocket.config.component import describe
from hocket.errors import ConfigError
from hocket.plugin import Kind
from hocket.strategy import Exchange


def enums_in(hint: Any) -> list[type[Enum]]:
    parts = typing.get_args(hint) or (hint,)
    return [part for part in parts if isinstance(part, type) and issubclass(part, Enum)]


def chosen(component: Any) -> Iterator[tuple[str, type[Enum]]]:
    hints = typing.get_type_hints(component)
    for field in dataclasses.fields(component):
        for enum in enums_in(hints[field.name]):
            yield field.name, enum


def choices() -> Iterator[Any]:
    for registration in everything().components():
        component = everything().resolve(registration.kind, registration.name)
        for field, enum in chosen(component):
            yield pytest.param(
                registration.kind, registration.name, field, enum, id=f"{registration.name}-{field}"
            )
    for field, enum in chosen(Exchange):
        yield pytest.param(None, "exchange", field, enum, id=f"exchange-{field}")


CHOICES = list(choices())


def test_those_that_were_misread_are_among_them() -> None:
    ids = {choice.id for choice in CHOICES}
    assert ids >= {
        "redsync.asq-feedback",
        "exponential-peers",
        "eager.partial_allreduce-starts",
        "gossipgrad.rotated-shuffles",
        "eapipe.pipeline-policy",
        "group-by",
        "exchange-every",
    }


@pytest.mark.parametrize(("kind", "name", "field", "enum"), CHOICES)
def test_a_word_is_its_member(kind: Kind | None, name: str, field: str, enum: type[Enum]) -> None:
    example = Exchange(Allreduce()) if kind is None else example_of(kind, name)
    given = _without_others(example, field)
    for member in enum:
        try:
            expected = type(example)(**{**given, field: member})
        except ValueError as error:
            # Not with what else the example has: the same of the word.
            with pytest.raises(type(error)):
                type(example)(**{**given, field: member.value})
            continue
        by_word = type(example)(**{**given, field: member.value})
        assert getattr(by_word, field) is member
        assert by_word == expected
        assert describe(by_word, everything()) == describe(expected, everything())
    for wrong in (f"{next(iter(enum)).value}s", "", object()):
        with pytest.raises(ConfigError) as caught:
            type(example)(**{**given, field: wrong})
        message = str(caught.value)
        assert message.startswith(f"{type(example).__name__}({field}={wrong!r}): {field} must be ")
        for member in enum:
            assert str(member.value) in message


def _without_others(example: Any, field: str) -> dict[str, Any]:
    """Return the example's fields; of groups, which take one of three, only the one that is tried."""
    given = {each.name: getattr(example, each.name) for each in dataclasses.fields(example) if each.init}
    return {**given, "size": None, "count": None} if field == "by" else given
