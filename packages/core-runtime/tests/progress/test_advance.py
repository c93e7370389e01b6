"""Requests under way are looked at in turns, a few at a time, until they are done."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.progress import InlineProgress
from hocket.transport.request import Request


class Counting(Request):
    """Done at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def wait(self, timeout_s: float | None = None) -> Any:
        raise AssertionError("nobody waits here")


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_in_turns(count: int) -> None:
    engine, requests = InlineProgress(), [Counting() for _ in range(count)]
    for request in requests:
        engine.watch(request)
    total = 0
    for _ in range(3 * count):
        engine.advance()
        looks = [request.looks for request in requests]
        assert sum(looks) - total <= 8, "a moment is not used for more than a few"
        assert max(looks) - min(looks) <= 1, "one is looked at twice before another one"
        total = sum(looks)
    assert total == 3 * count, "what is done is looked at no more"


def test_what_was_waited_for_is_kept_no_longer() -> None:
    engine, requests = InlineProgress(), [Counting() for _ in range(3)]
    for request in requests:
        engine.watch(request)
    for request in (requests[1], requests[1], requests[0]):  # once for each segment that it was for
        engine.unwatch(request)
    engine.advance()
    assert [request.looks for request in requests] == [0, 0, 1]
