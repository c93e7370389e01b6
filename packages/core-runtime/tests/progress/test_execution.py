"""What fires when, and what comes with rings, on one rank whose messages are made by hand."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import TransportError
from hocket.kernels import program as kernel
from hocket.progress.execution import Execution
from hocket.schedule import Add, Compute, Copy, Logic, Mutex, NoOp, Operation, Receive, Schedule, Send
from hocket.transport.signals import Connection, Ring
from hocket.transport.single import SinglePeer


class Pipe(Connection):
    """The bell of rank 0, which is heard and reached: a pipe without a reader but this test."""

    largest_bytes = 64

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.has_room = True
        self.rung: list[tuple[int, int, bytes | None]] = []

    def reaches(self, rank: int) -> bool:
        return True

    def hears(self, rank: int) -> bool:
        return True

    def bell(self, rank: int) -> tuple[int, int]:
        return self.writing, 7

    def ring(self, rank: int, message: int, round: int, data: bytes | None = None) -> bool:
        if self.has_room:
            self.rung.append((message, round, data))
        return self.has_room

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)

    def read(self) -> list[int]:
        """Return the words that have been written."""
        return np.frombuffer(os.read(self.reading, 1 << 16), np.int64).tolist()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with closing(Pipe()) as pipe:
        yield pipe


def execution(pipe: Connection, *operations: Operation, last: str, trigger: str | None = None) -> Execution:
    schedule = Schedule(operations, (last,), trigger=trigger, persistent=True, num_tags=2)
    return Execution(schedule, SinglePeer().lane("test"), pipe)


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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schedule=schedules(), rounds=st.integers(1, 4))
def test_operations_fire_as_their_dependencies_say(schedule: Schedule, rounds: int) -> None:
    fired: list[tuple[int, str]] = []

    def noting(operation: Operation) -> Operation:
        if not isinstance(operation, Compute):
            return operation
        return replace(operation, call=lambda round: fired.append((round, operation.name)))

    noted = replace(schedule, operations=tuple(map(noting, schedule.operations)))
    with closing(Pipe()) as pipe:
        run = Execution(noted, SinglePeer().lane("test"), pipe)
    run.wanted = rounds
    assert run.advance([], everywhere=True)
    assert not run.advance([], everywhere=True)
    assert run.round == rounds
    assert fired == [(round, name) for round in range(rounds) for name in expected(schedule)]


def test_a_computation_may_have_progress_made(pipe: Pipe) -> None:
    made: list[int] = []

    def work(round: int) -> None:
        made.append(round)
        run.advance([], everywhere=False)

    run = execution(pipe, NoOp("go"), Compute("work", ("go",), call=work), last="work", trigger="go")
    run.wanted = 2
    run.advance([], everywhere=False)
    assert made == [0, 1]


# ------------------------------------------------------------------------------------------- what goes without Python


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "int32", "int64"])
def test_adds_as_numpy_does(pipe: Pipe, dtype: str) -> None:
    rng = np.random.default_rng(0)
    total, addend = (rng.uniform(-100, 100, 1001).astype(dtype) for _ in range(2))
    wanted = total + addend
    run = execution(
        pipe, NoOp("go"), Add("add", ("go",), total=total, addend=addend), last="add", trigger="go"
    )
    run.wanted = 1
    run.advance([], everywhere=True)
    np.testing.assert_array_equal(total, wanted)


def test_takes_what_has_accumulated(pipe: Pipe) -> None:
    source, to, stamp, lock = np.arange(5.0), np.ones(5), np.zeros(1, np.int64), Mutex()
    take = Copy("take", ("go",), source=source, to=to, clears=True, stamp=stamp, lock=lock)
    run = execution(pipe, NoOp("go"), take, last="take", trigger="go")
    for round in range(3):
        run.wanted = round + 1
        run.advance([], everywhere=True)
        np.testing.assert_array_equal(to, (round + 1) * np.arange(5.0))
        np.testing.assert_array_equal(source, np.zeros(5))
        assert stamp == [round]
        with lock:  # it has been given back
            source += (round + 2) * np.arange(5.0)


# ------------------------------------------------------------------------------------------------------- rings


def test_sends_and_notices_are_written_to_the_bell(pipe: Pipe) -> None:
    data = np.array([3, 4])
    notice, message = Send("call", ("go",), tag=0), Send("send", ("go",), tag=1, data=data)
    run = execution(pipe, NoOp("go"), notice, message, last="send", trigger="go")
    run.wanted = 2
    run.advance([], everywhere=True)
    assert pipe.read() == [7, 0, 0, 0, 0, 7, 0, 1, 0, 16, 3, 4, 7, 0, 0, 1, 0, 7, 0, 1, 1, 16, 3, 4]
    assert not pipe.rung


def test_a_full_bell_is_rung_again(pipe: Pipe) -> None:
    while True:
        try:
            os.write(pipe.writing, bytes(4096))
        except BlockingIOError:
            break
    run = execution(pipe, NoOp("go"), Send("call", ("go",), tag=1), last="call", trigger="go")
    run.wanted = 1
    pipe.has_room = False
    run.advance([], everywhere=True)
    assert (run.round, run.in_flight) == (0, True)
    pipe.has_room = True
    assert run.advance([], everywhere=False)
    assert (run.round, run.in_flight) == (1, False)
    assert pipe.rung == [(1, 0, b"")]


def test_what_comes_early_is_kept_for_its_round(pipe: Pipe) -> None:
    data = np.zeros(1)
    taken: list[float] = []
    receive = Receive("receive", data=data, tag=1)
    take = Compute("take", ("receive",), call=lambda round: taken.append(data[0]))
    run = execution(pipe, receive, take, last="take")
    run.advance([_ring(2, 12.0), _ring(1, 11.0)], everywhere=False)
    assert taken == []
    assert run.awaited() == [(0, "receive")]
    run.advance([_ring(0, 10.0)], everywhere=False)
    assert taken == [10.0, 11.0, 12.0]
    assert run.round == 3


def test_a_notice_that_comes_while_its_receive_is_queued_counts_once(pipe: Pipe) -> None:
    both: list[int] = []
    operations = [
        NoOp("go"),
        Compute("work"),
        Receive("one", tag=0),
        Receive("two", tag=1),
        Compute("both", ("one", "two"), call=both.append),
    ]
    run = execution(pipe, *operations, last="both", trigger="go")
    work = kernel.go_on(run.program, np.empty(32, np.int64))  # as the bell does, until Python is needed
    assert operations[work].name == "work"
    run.advance([Ring(0, 0, 0, 0, b"")], everywhere=False)
    assert both == []
    run.advance([Ring(0, 0, 1, 0, b"")], everywhere=False)
    assert both == [0]
    assert run.round == 1


def test_a_message_of_another_length_is_refused(pipe: Pipe) -> None:
    run = execution(pipe, Receive("receive", data=np.zeros(3), tag=1), last="receive")
    run.advance([], everywhere=False)
    with pytest.raises(TransportError, match="a message of 8 bytes came into a buffer of 24"):
        run.advance([_ring(0, 1.0)], everywhere=False)


def _ring(round: int, value: float) -> Ring:
    return Ring(0, 0, 1, round, np.float64(value).tobytes())
