"""The virtual clock, its agenda, and every task's state; without threads."""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

from hocket.errors import DeadlockError, ExchangeTimeoutError

Event = Callable[[], None]

_REPORTED_TASKS = 16

#: Events come before tasks that are due at the same time; tasks draw from [0, 1).
_EVENT_PRIORITY = -1.0

#: So many polls in a row, per task, between which nothing else happened, are a loop that waits.
_IDLE_POLLS_PER_TASK = 20_000


class ThreadState(enum.Enum):
    """The state of a task, in the words of reports."""

    READY = "is ready to run"
    RUNNING = "computes"
    WAITING = "waits for"
    POLLING = "polls for"
    ENDED = "has ended"


class Signal:
    """A signal that is set once, at a moment of virtual time, by `Timeline.fire`."""

    __slots__ = ("is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[ScheduledThread] = []


class ScheduledThread:
    """A thread that runs while it holds the token.

    Attributes:
        rank: the rank it belongs to; several tasks may share one.
        name: its role on that rank, for instance `main`.
        call: the function that it runs.
        result: the function's result, None before.
        note: its last note about itself.
        token: released to hand the token to this task.
        state: its state.
        awaited: the signal that it waits for, None if it does not wait.
        describe_awaited: returns the event that it waits or polls for, and its source.
        since_s: begin of its wait, in virtual seconds.
        timeout_s: longest wait from `since_s`, in virtual seconds.
        has_own_timeout: whether the wait itself set `timeout_s`, and not the peer's default.
        error: an error to raise in it when it runs again.
    """

    def __init__(self, rank: int, name: str, call: Callable[[], object]) -> None:
        self.rank = rank
        self.name = name
        self.call = call
        self.result: Any = None
        self.note = ""
        self.token = threading.Lock()
        self.token.acquire()
        self.state = ThreadState.READY
        self.awaited: Signal | None = None
        self.describe_awaited: Callable[[], str] | None = None
        self.since_s = 0.0
        self.timeout_s = math.inf
        self.has_own_timeout = False
        self.error: BaseException | None = None

    @property
    def deadline_s(self) -> float:
        """Return the virtual time at which its wait ends in an error, in seconds."""
        return self.since_s + self.timeout_s

    @property
    def is_blocked(self) -> bool:
        """Tell whether only other tasks can let it continue."""
        return self.state in (ThreadState.WAITING, ThreadState.POLLING)

    def __str__(self) -> str:
        return f"rank {self.rank} [{self.name}]" + (f" ({self.note})" if self.note else "")

    def describe(self, now_s: float) -> str:
        """Return the task's state, in one line."""
        if not self.is_blocked or self.describe_awaited is None:
            return f"{self} {self.state.value}"
        return f"{self} {self.state.value} {self.describe_awaited()}, since {now_s - self.since_s:.6g} s"


class _Agenda:
    """Events, and tasks that are ready to run, by the moment at which they are due.

    At the same moment events run first, in the order of their planning; between tasks a seeded draw decides.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed).random
        self._order = itertools.count()
        self._heap: list[tuple[float, float, int, ScheduledThread | Event]] = []

    @property
    def next_due_s(self) -> float:
        """Return the virtual time of the next entry, in seconds; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def add_event(self, due_s: float, event: Event) -> None:
        heapq.heappush(self._heap, (due_s, _EVENT_PRIORITY, next(self._order), event))

    def add_task(self, due_s: float, task: ScheduledThread) -> None:
        heapq.heappush(self._heap, (due_s, self._draw(), next(self._order), task))

    def pop(self) -> tuple[float, ScheduledThread | Event]:
        """Remove the next entry and return it with its time."""
        due_s, _, _, item = heapq.heappop(self._heap)
        return due_s, item


class Timeline:
    """The clock and the tasks of one run.

    Attributes:
        now_s: the virtual clock, in seconds from the start of the run.
        tasks: all tasks so far, in the order of their creation.
    """

    def __init__(self, seed: int) -> None:
        """Start at 0 without tasks; `seed` decides between tasks that are due at the same time."""
        self.now_s = 0.0
        self.tasks: list[ScheduledThread] = []
        self._agenda = _Agenda(seed)
        self._next_deadline_s = math.inf  # no wait ends earlier than this; perhaps none ends so early
        self._idle_polls = 0

    def describe(self) -> str:
        """Return every task's state, a line each, waiting tasks first."""
        return _describe_tasks(self.tasks, self.now_s)

    def call_at(self, time_s: float, event: Event) -> None:
        """Plan `event()` for a moment from now on; it may neither sleep nor wait."""
        self._agenda.add_event(time_s, event)

    def fire(self, signal: Signal) -> None:
        """Set `signal` now and make the tasks that wait for it ready."""
        signal.is_set = True
        for task in signal.waiting:
            if task.awaited is signal:
                self.make_ready(task, self.now_s)
        signal.waiting.clear()

    def make_ready(self, task: ScheduledThread, due_s: float) -> None:
        """Plan `task`'s turn at `due_s`."""
        task.state = ThreadState.READY
        task.awaited = task.describe_awaited = None
        self._agenda.add_task(due_s, task)

    def pass_alone(self, seconds: float) -> bool:
        """Move the clock if no entry is due within `seconds`, end included; return whether it moved."""
        due_s = self.now_s + seconds
        if due_s < self._next_deadline_s and due_s < self._agenda.next_due_s:
            self.now_s = due_s
            return True
        return False

    def await_signal(
        self,
        task: ScheduledThread,
        signal: Signal,
        describe: Callable[[], str],
        timeout_s: float,
        is_own_timeout: bool,
    ) -> None:
        """Block `task` until `signal` is set or `timeout_s` have passed; see `Scheduler.wait`."""
        task.state, task.describe_awaited, task.since_s = ThreadState.WAITING, describe, self.now_s
        task.timeout_s = max(timeout_s, 0.0)
        task.has_own_timeout = is_own_timeout and timeout_s < math.inf
        task.awaited = signal
        signal.waiting.append(task)
        self._next_deadline_s = min(self._next_deadline_s, task.deadline_s)

    def await_change(self, task: ScheduledThread, describe: Callable[[], str]) -> None:
        """Block `task`, which polls in vain, until another event."""
        task.state, task.describe_awaited, task.since_s = ThreadState.POLLING, describe, self.now_s

    def note_poll(self) -> bool:
        """Count a poll and return whether so many came in a row that polling counts as waiting."""
        self._idle_polls += 1
        return self._idle_polls > _IDLE_POLLS_PER_TASK * len(self.tasks)

    def note_change(self) -> None:
        """Note an event other than a poll, so that polling tasks may look again."""
        if self._idle_polls:
            self._idle_polls = 0
            for task in self.tasks:
                if task.state is ThreadState.POLLING:
                    self.make_ready(task, self.now_s)

    def wake_blocked(self, error: Callable[[ScheduledThread], BaseException] | None = None) -> None:
        """Make every task that waits or polls ready, to raise its own `error(task)` if there is one."""
        for task in self.tasks:
            if task.is_blocked:
                task.error = None if error is None else error(task)
                self.make_ready(task, self.now_s)

    def interrupt(self, rank: int, error: Callable[[], BaseException]) -> None:
        """Make `rank`'s tasks except the running one raise their own `error()`, sleeping ones when they wake."""
        for task in self.tasks:
            if task.rank == rank and task.state not in (ThreadState.RUNNING, ThreadState.ENDED):
                task.error = error()
                if task.is_blocked:
                    self.make_ready(task, self.now_s)

    def advance(self) -> ScheduledThread | Event:
        """Move the clock to the next entry, and return that.

        A wait's timeout is an entry, too. If no entry is left, and no wait has a timeout of its own, all remaining
        tasks wait in vain: each will raise DeadlockError.
        """
        if self._agenda.next_due_s == math.inf and not any(task.has_own_timeout for task in self._waiting()):
            report = f"no virtual rank can continue:\n{self.describe()}"
            self.wake_blocked(lambda _: DeadlockError(report))
        if self._next_deadline_s < self._agenda.next_due_s:
            self._expire_first()
        self.now_s, following = self._agenda.pop()
        if not isinstance(following, ScheduledThread):
            self.note_change()
        return following

    def _waiting(self) -> list[ScheduledThread]:
        return [task for task in self.tasks if task.state is ThreadState.WAITING]

    def _expire_first(self) -> None:
        """Let the earliest deadline pass, if it is earlier than the next entry of the agenda."""
        first = min(self._waiting(), key=lambda task: task.deadline_s, default=None)
        self._next_deadline_s = math.inf if first is None else first.deadline_s
        if first is None or first.deadline_s >= self._agenda.next_due_s:
            return
        self.now_s = first.deadline_s
        first.error = ExchangeTimeoutError(
            f"{first.describe(self.now_s)}: not finished within {first.timeout_s:g} s"
        )
        self.note_change()
        self.make_ready(first, self.now_s)


def _describe_tasks(tasks: Iterable[ScheduledThread], now_s: float) -> str:
    """Return each task's state, a line each, at most 16, blocked ones first."""
    ordered = sorted(tasks, key=lambda task: (not task.is_blocked, task.rank))
    lines = [task.describe(now_s) for task in ordered[:_REPORTED_TASKS]]
    if len(ordered) > _REPORTED_TASKS:
        lines.append(f"and {len(ordered) - _REPORTED_TASKS} more tasks")
    return "\n".join(lines)
