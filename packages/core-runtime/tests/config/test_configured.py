"""Dataclasses whose fields are configuration, built in Python: a choice is a member of its Enum or refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pytest

from hocket.configured import Configured
from hocket.errors import ConfigError


class Side(StrEnum):
    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True)
class Plain(Configured):
    side: Side = Side.LEFT
    other: Side | None = None
    count: int | Side = 1


@dataclass(frozen=True)
class Checked(Plain):
    def __post_init__(self) -> None:
        if self.side is self.other:
            raise ValueError("side and other are one")


@dataclass(frozen=True)
class Below(Checked):
    third: Side = Side.LEFT


@pytest.mark.parametrize("component", [Plain, Checked, Below])
def test_a_word_becomes_the_member(component: type[Plain]) -> None:
    given: Any = {"side": "right", "count": "left"}
    built = component(**given)
    assert (built.side, built.other, built.count) == (Side.RIGHT, None, Side.LEFT)
    assert built.side is Side.RIGHT
    assert replace(built, **{"other": "left"}).other is Side.LEFT  # type: ignore[arg-type]
    assert component(count=3).count == 3


def test_it_is_one_before_the_dataclass_looks_itself() -> None:
    word: Any = "left"
    with pytest.raises(ValueError, match="side and other are one"):
        Below(side=word, other=word)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"side": "lefft"}, "Below(side='lefft'): side must be one of left, right. Did you mean 'left'?"),
        ({"third": None}, "Below(third=None): third must be one of left, right."),
        ({"other": 3}, "Below(other=3): other must be one of left, right or null."),
        ({"count": "one"}, "Below(count='one'): count must be an integer or left or right."),
    ],
)
def test_anything_else_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Below(**given)
    assert str(caught.value) == message


def test_an_annotation_that_only_a_type_checker_sees_is_refused_as_when_registered() -> None:
    @dataclass(frozen=True)
    class Unseen(Configured):
        side: Nowhere = None  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="Unseen has an annotation that cannot be evaluated at run time"):
        Unseen()
