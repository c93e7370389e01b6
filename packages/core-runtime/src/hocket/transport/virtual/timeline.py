"""What happens when: the virtual clock, and what every task is ready for or waits for. No threads in here."""

from __future__ import annotations

import math
from collections.abc import Callable

from hocket.errors import DeadlockError, ExchangeTimeoutError
from hocket.transport.virtual.agenda import Agenda, Event
from hocket.transport.virtual.task import Signal, State, Task, describe_tasks

__all__ = ["Timeline"]

#: So many polls in a row, per task, between which nothing else happened, are a loop that waits.
_IDLE_POLLS_PER_TASK = 20_000


class Timeline:
    """The clock and the tasks of one run.

    Attributes:
        now_s: the virtual clock, in seconds from the start of the run.
        tasks: all tasks that there were, in the order in which they came.
    """

    def __init__(self, seed: int) -> None:
        """Start at 0 without tasks; `seed` decides between tasks that are due at the same time."""
        self.now_s = 0.0
        self.tasks: list[Task] = []
        self._agenda = Agenda(seed)
        self._next_deadline_s = math.inf  # no wait ends earlier than this; perhaps none ends so early
        self._idle_polls = 0

    def describe(self) -> str:
        """Say what every task is doing, a line each, those that wait first."""
        return describe_tasks(self.tasks, self.now_s)

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

    def make_ready(self, task: Task, due_s: float) -> None:
        """Let it be `task`'s turn at `due_s`."""
        task.state = State.READY
        task.awaited = task.describe_awaited = None
        self._agenda.add_task(due_s, task)

    def pass_alone(self, seconds: float) -> bool:
        """Move the clock if nothing is due within `seconds`, end included; return whether it moved."""
        due_s = self.now_s + seconds
        if due_s < self._next_deadline_s and due_s < self._agenda.next_due_s:
            self.now_s = due_s
            return True
        return False

    def await_signal(
        self, task: Task, signal: Signal, describe: Callable[[], str], timeout_s: float, is_own_timeout: bool
    ) -> None:
        """Block `task` until `signal` is set or `timeout_s` have passed; see `Scheduler.wait`."""
        task.state, task.describe_awaited, task.since_s = State.WAITING, describe, self.now_s
        task.timeout_s = max(timeout_s, 0.0)
        task.has_own_timeout = is_own_timeout and timeout_s < math.inf
        task.awaited = signal
        signal.waiting.append(task)
        self._next_deadline_s = min(self._next_deadline_s, task.deadline_s)

    def await_change(self, task: Task, describe: Callable[[], str]) -> None:
        """Block `task`, which polls in vain, until something happens."""
        task.state, task.describe_awaited, task.since_s = State.POLLING, describe, self.now_s

    def note_poll(self) -> bool:
        """Count a poll and return whether there were so many in a row that polling is waiting."""
        self._idle_polls += 1
        return self._idle_polls > _IDLE_POLLS_PER_TASK * len(self.tasks)

    def note_change(self) -> None:
        """Something other than a poll happens: those that poll may look again."""
        if self._idle_polls:
            self._idle_polls = 0
            for task in self.tasks:
                if task.state is State.POLLING:
                    self.make_ready(task, self.now_s)

    def wake_blocked(self, error: Callable[[Task], BaseException] | None = None) -> None:
        """Make every task that waits or polls ready, to raise its own `error(task)` if there is one."""
        for task in self.tasks:
            if task.is_blocked:
                task.error = None if error is None else error(task)
                self.make_ready(task, self.now_s)

    def interrupt(self, rank: int, error: Callable[[], BaseException]) -> None:
        """Have `rank`'s tasks but the running one raise their own `error()`, those that sleep when they wake."""
        for task in self.tasks:
            if task.rank == rank and task.state not in (State.RUNNING, State.ENDED):
                task.error = error()
                if task.is_blocked:
                    self.make_ready(task, self.now_s)

    def advance(self) -> Task | Event:
        """Move the clock to what is next, and return that.

        A wait whose timeout passes is next when it is due. Where nothing is due, and no wait has set itself a
        timeout, all tasks that are left have waited in vain: each will raise DeadlockError.
        """
        if self._agenda.next_due_s == math.inf and not any(task.has_own_timeout for task in self._waiting()):
            report = f"no virtual rank can go on:\n{self.describe()}"
            self.wake_blocked(lambda _: DeadlockError(report))
        if self._next_deadline_s < self._agenda.next_due_s:
            self._expire_first()
        self.now_s, following = self._agenda.pop()
        if not isinstance(following, Task):
            self.note_change()
        return following

    def _waiting(self) -> list[Task]:
        return [task for task in self.tasks if task.state is State.WAITING]

    def _expire_first(self) -> None:
        """Let the earliest deadline pass, if it is really earlier than what is next on the agenda."""
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
