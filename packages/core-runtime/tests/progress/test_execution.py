"""The order in which operations fire, wake-ups and messages, on one rank whose messages are made by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import TransportError
from hocket.progress import Execution, InlineProgress
from hocket.schedule import Add, Compute, Logic, NoOp, Operation, Receive, Schedule, Send
from hocket.transport.lane import Lane
from hocket.transport.signals import Bells
from hocket.transport.single import SinglePeer

_ON_LANE = -1


class Reached(Bells):
    """A connection to rank 0, which hears and is heard; it notes what is rung."""

    def __init__(self) -> None:
        self.has_room = True
        self.rung: list[tuple[int, int]] = []

    def reaches(self, rank: int) -> bool:
        return True

    def hears(self, rank: int) -> bool:
        return True

    def ring(self, rank: int, message: int, round: int) -> bool:
        if self.has_room:
            self.rung.append((message, round))
        return self.has_room


class Inline(InlineProgress):
    """An engine whose activities are advanced by the test alone."""

    def __init__(self, connection: Bells) -> None:
        super().__init__()
        self.connection = connection
        self.lane: Lane = SinglePeer().lane("test")

    def open(self, activity, peer, name):  # type: ignore[no-untyped-def]
        activity.begin(self.lane, self.connection)

    def nudge(self) -> None:
        pass


def execution(
    connection: Reached, *operations: Operation, last: str, trigger: str | None = None
) -> tuple[Execution, Lane]:
    schedule = Schedule(operations, (last,), trigger=trigger, persistent=True, num_tags=2)
    engine = Inline(connection)
    return Execution(schedule, SinglePeer(), engine, "test"), engine.lane


# ------------------------------------------------------------------------------------------------ what fires when


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw a graph of computations, which all come after a trigger."""
    operations: list[Operation] = [NoOp("0")]
    for i in range(1, draw(st.integers(2, 12))):
        after = draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=4))
        logic = draw(st.sampled_from(Logic))
        operations.append(Compute(str(i), tuple(map(str, sorted(after))), logic))
    last = draw(st.sets(st.integers(0, len(operations) - 1), min_size=1, max_size=3))
    order = draw(st.permutations(operations))
    return Schedule(tuple(order), tuple(map(str, sorted(last))), trigger="0", persistent=True)


def expected(schedule: Schedule) -> list[str]:
    """Return the computations of a round in order: whatever is ready goes into a queue, in order of the schedule."""
    done: list[str] = []
    queue = deque([schedule.trigger])
    fired = {schedule.trigger}
    while queue:
        done.append(str(queue.popleft()))
        for operation in schedule.operations:
            combine = all if operation.logic is Logic.ALL else any
            ready = combine(name in done for name in operation.after)
            if ready and done[-1] in operation.after and operation.name not in fired:
                fired.add(operation.name)
                queue.append(operation.name)
    return done[1:]


@given(schedule=schedules(), rounds=st.integers(1, 4))
def test_operations_fire_as_their_dependencies_say(schedule: Schedule, rounds: int) -> None:
    fired: list[tuple[int, str]] = []

    def noting(operation: Operation) -> Operation:
        if not isinstance(operation, Compute):
            return operation
        return replace(operation, call=lambda round: fired.append((round, operation.name)))

    noted = replace(schedule, operations=tuple(map(noting, schedule.operations)))
    run = Execution(noted, SinglePeer(), Inline(Reached()), "test")
    run.start(rounds - 1)
    assert run.advance(everywhere=True)
    assert not run.advance(everywhere=True)
    assert run.num_ended == rounds
    assert fired == [(round, name) for round in range(rounds) for name in expected(schedule)]


def test_a_computation_may_have_progress_made() -> None:
    made: list[int] = []

    def work(round: int) -> None:
        made.append(round)
        run.advance(everywhere=False)

    run, _ = execution(Reached(), NoOp("go"), Compute("work", ("go",), call=work), last="work", trigger="go")
    run.start(1)
    run.advance(everywhere=False)
    assert made == [0, 1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "int32", "int64"])
def test_adds_as_numpy_does(dtype: str) -> None:
    rng = np.random.default_rng(0)
    total, addend = (rng.uniform(-100, 100, 1001).astype(dtype) for _ in range(2))
    wanted = total + addend
    add = Add("add", ("go",), total=total, addend=addend)
    run, _ = execution(Reached(), NoOp("go"), add, last="add", trigger="go")
    run.start(0)
    run.advance(everywhere=True)
    np.testing.assert_array_equal(total, wanted)


# -------------------------------------------------------------------------------------------- wake-ups and messages


def test_a_notice_is_a_wake_up_and_data_a_message_with_one() -> None:
    connection, data = Reached(), np.array([3, 4])
    notice, message = Send("call", ("go",), tag=0), Send("send", ("go",), tag=1, data=data)
    run, lane = execution(connection, NoOp("go"), notice, message, last="send", trigger="go")
    run.start(1)
    run.advance(everywhere=True)
    assert connection.rung == [(0, 0), (1, _ON_LANE), (0, 1), (1, _ON_LANE)]
    received = np.zeros(2, int)
    lane.irecv(received, 0, 2 * 1 + 1).wait()
    np.testing.assert_array_equal(received, data)


def test_a_wake_up_without_room_is_tried_again() -> None:
    connection = Reached()
    run, _ = execution(connection, NoOp("go"), Send("call", ("go",), tag=1), last="call", trigger="go")
    run.start(0)
    connection.has_room = False
    run.advance(everywhere=True)
    assert (run.num_ended, run.in_flight) == (0, True)
    connection.has_room = True
    assert run.advance(everywhere=False)
    assert (run.num_ended, run.in_flight) == (1, False)
    assert connection.rung == [(1, 0)]


def test_messages_are_looked_for_where_a_wake_up_tells_of_them() -> None:
    data, taken = np.zeros(1), []
    receive = Receive("receive", data=data, tag=1)
    take = Compute("take", ("receive",), call=lambda round: taken.append(data[0]))
    run, lane = execution(Reached(), receive, take, last="take")
    run.advance(everywhere=False)
    for round in range(3):
        lane.isend(np.array([10.0 + round]), 0, 2 * (1 + round) + 1)
    run.advance(everywhere=False)
    assert (taken, run.in_flight) == ([], False), "nothing has rung"
    for _ in range(3):
        run.note_rung(1, _ON_LANE)
        run.advance(everywhere=False)
    assert taken == [10.0, 11.0, 12.0]
    run.note_rung(1, _ON_LANE)
    run.advance(everywhere=False)
    assert run.in_flight, "a message that has rung is not here yet: it is polled for"


def test_a_notice_that_comes_while_its_receive_is_queued_counts_once() -> None:
    both: list[int] = []

    def work(round: int) -> None:
        if not round:
            run.note_rung(0, 0)  # while the receives behind it are queued

    operations = [
        NoOp("go"),
        Compute("work", call=work),
        Receive("one", tag=0),
        Receive("two", tag=1),
        Compute("both", ("one", "two"), call=both.append),
    ]
    run, _ = execution(Reached(), *operations, last="both", trigger="go")
    run.advance(everywhere=False)
    assert both == []
    run.note_rung(1, 0)
    run.advance(everywhere=False)
    assert both == [0]
    assert run.num_ended == 1


def test_a_notice_of_a_later_round_counts_from_now_on() -> None:
    heard: list[int] = []
    operations = [Receive("hear"), Compute("note", ("hear",), call=heard.append)]
    run, _ = execution(Reached(), *operations, last="note")
    run.note_rung(0, 2)
    run.advance(everywhere=False)
    assert heard == [0, 1, 2]


def test_a_message_of_another_length_is_refused() -> None:
    run, lane = execution(Reached(), Receive("receive", data=np.zeros(3), tag=1), last="receive")
    lane.isend(np.ones(1), 0, 3)
    with pytest.raises(TransportError, match=r"test failed in round 0 at operation 'receive': .*8 bytes"):
        run.advance(everywhere=False)
