"""The order of the simulation, without threads."""

from __future__ import annotations

import pytest

from hocket.errors import DeadlockError, ExchangeTimeoutError
from hocket.transport.virtual.timeline import ScheduledThread, Signal, ThreadState, Timeline


def add_tasks(timeline: Timeline, num_tasks: int) -> list[ScheduledThread]:
    tasks = [ScheduledThread(rank, "main", int) for rank in range(num_tasks)]
    timeline.tasks += tasks
    return tasks


def test_the_earliest_is_next() -> None:
    timeline = Timeline(0)
    early, late = add_tasks(timeline, 2)
    timeline.make_ready(late, 2.0)
    timeline.make_ready(early, 1.0)
    assert [(timeline.advance(), timeline.now_s) for _ in range(2)] == [(early, 1.0), (late, 2.0)]


def test_events_come_before_tasks_and_in_the_order_in_which_they_were_planned() -> None:
    for seed in range(10):
        timeline, events = Timeline(seed), [lambda: None for _ in range(3)]
        (task,) = add_tasks(timeline, 1)
        timeline.make_ready(task, 1.0)
        for event in events:
            timeline.call_at(1.0, event)
        assert [timeline.advance() for _ in range(4)] == [*events, task]


def test_a_draw_decides_between_tasks() -> None:
    first = set()
    for seed in range(20):
        timeline = Timeline(seed)
        for task in add_tasks(timeline, 2):
            timeline.make_ready(task, 1.0)
        following = timeline.advance()
        assert isinstance(following, ScheduledThread)
        first.add(following.rank)
    assert first == {0, 1}


def test_time_passes_alone_only_while_nothing_is_due() -> None:
    timeline = Timeline(0)
    timeline.call_at(3.0, lambda: None)
    assert timeline.pass_alone(2.0)
    assert not timeline.pass_alone(1.0)
    assert timeline.now_s == 2.0


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 2.0])
def test_a_timeout_wakes_its_task_alone(timeout_s: float) -> None:
    timeline, signal = Timeline(0), Signal()
    hasty, patient = add_tasks(timeline, 2)
    timeline.now_s = 5.0
    timeline.await_signal(hasty, signal, lambda: "it", timeout_s, is_own_timeout=True)
    timeline.await_signal(patient, signal, lambda: "it", 100.0, is_own_timeout=False)
    assert timeline.advance() is hasty
    assert timeline.now_s == 5.0 + max(timeout_s, 0.0)
    assert type(hasty.error) is ExchangeTimeoutError
    timeline.fire(signal)  # must not wake the one that has given up
    assert timeline.advance() is patient
    assert patient.error is None


def test_waits_with_the_default_timeout_alone_are_a_deadlock() -> None:
    timeline = Timeline(0)
    tasks = add_tasks(timeline, 3)
    tasks[2].state = ThreadState.ENDED
    for task in tasks[:2]:
        timeline.await_signal(task, Signal(), lambda: "nothing", 100.0, is_own_timeout=False)
    assert {timeline.advance(), timeline.advance()} == set(tasks[:2])
    assert all(isinstance(task.error, DeadlockError) for task in tasks[:2])
    assert timeline.now_s == 0.0


def test_a_report_of_many_tasks_is_cut_short() -> None:
    timeline = Timeline(0)
    tasks = add_tasks(timeline, 64)
    timeline.await_signal(tasks[50], Signal(), lambda: "it", 1.0, is_own_timeout=True)
    lines = timeline.describe().splitlines()
    assert lines[0] == "rank 50 [main] waits for it, since 0 s"
    assert (len(lines), lines[-1]) == (17, "and 48 more tasks")
