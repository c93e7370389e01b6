"""Schedules that are valid and that are not, and chains of schedules."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.schedule import (
    Add,
    Compute,
    NoOp,
    Operation,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    chain,
    recursive_doubling_allreduce,
)


@pytest.mark.parametrize(
    ("operations", "last", "trigger", "message"),
    [
        ([NoOp("a"), NoOp("a")], "a", None, "more than one operation is named 'a'"),
        (
            [NoOp("start"), NoOp("b", ("strat",))],
            "b",
            None,
            "comes after 'strat', which does not exist. Did you mean 'start'?",
        ),
        ([NoOp("a", ("b",)), NoOp("b", ("a",))], "a", None, "operations depend on each other in a circle: "),
        ([NoOp("a", ("a",))], "a", None, "operations depend on each other in a circle: a -> a"),
        ([NoOp("a")], "b", None, "'b', named as last or trigger, does not exist"),
        ([NoOp("a")], "a", "b", "'b', named as last or trigger, does not exist"),
        ([Compute("a")], "a", "a", "the trigger 'a' must be a NoOp that comes after no other operation"),
        (
            [NoOp("b"), NoOp("a", ("b",))],
            "a",
            "a",
            "the trigger 'a' must be a NoOp that comes after no other operation",
        ),
        ([Send("a", to=1, tag=1)], "a", None, "operation 'a' has tag 1, but num_tags is 1"),
        (
            [Receive("a", source=1), Receive("b", source=1)],
            "a",
            None,
            "another operation exchanges a message with rank 1",
        ),
        ([Send("a", data=np.zeros((4, 4))[:, 1], to=1)], "a", None, "'a': its data must be C-contiguous"),
        (
            [Add("a", total=np.zeros(3), addend=np.zeros(4))],
            "a",
            None,
            r"'a': its arrays have different types, float64\[[34]\] and",
        ),
        (
            [Add("a", total=np.zeros(3), addend=np.zeros(3, "f4"))],
            "a",
            None,
            "'a': its arrays have different types",
        ),
        (
            [Receive("a", source=1, data=np.frombuffer(bytes(24)))],
            "a",
            None,
            "'a': the array that it writes is read-only",
        ),
    ],
)
def test_what_is_no_schedule(
    operations: list[Operation], last: str, trigger: str | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message.replace("?", r"\?")):
        Schedule(tuple(operations), (last,), trigger)


def test_an_execution_must_end_and_pause() -> None:
    with pytest.raises(ScheduleError, match="would never end"):
        Schedule((NoOp("a"),), ())
    with pytest.raises(ScheduleError, match="would never pause"):
        Schedule((NoOp("a"),), ("a",), persistent=True)


def test_a_send_and_a_receive_may_share_a_tag() -> None:
    Schedule((Send("a", to=1), Receive("b", source=1)), ("a", "b"))


def test_a_chain_does_one_part_after_the_other() -> None:
    first = Schedule((NoOp("go"), Compute("work", ("go",))), ("work",), trigger="go")
    second = Schedule(
        (NoOp("go"), Receive("early", source=1, tag=1), Send("out", ("go",), to=1)),
        ("early", "out"),
        trigger="go",
        num_tags=2,
    )
    both = chain(("a", first), ("b", second), ("c", first), persistent=True)
    after = {operation.name: operation.after for operation in both.operations}
    assert after["b.go"] == ("a.work",)
    assert after["b.early"] == ()  # pre-posted all the same
    assert after["c.go"] == ("b.early", "b.out")
    assert (both.trigger, both.last, both.persistent, both.num_tags) == ("a.go", ("c.work",), True, 4)
    assert [o.tag for o in both.operations if isinstance(o, Send | Receive)] == [2, 1]


def test_tags_do_not_depend_on_the_rank() -> None:
    for size in range(1, 18):
        parts = [recursive_doubling_allreduce(rank, size, np.zeros(1)) for rank in range(size)]
        assert len({part.num_tags for part in parts}) == 1
