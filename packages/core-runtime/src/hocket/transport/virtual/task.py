"""A thread of a virtual world, and what it can wait for."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Signal", "State", "Task", "describe_tasks"]

_REPORTED_TASKS = 16


class State(enum.Enum):
    """What a task is doing, as reports say it."""

    READY = "is ready to run"
    RUNNING = "computes"
    WAITING = "waits for"
    POLLING = "polls for"
    ENDED = "has ended"


class Signal:
    """Something that becomes true once, at a moment of virtual time; `Scheduler.fire` makes it so."""

    __slots__ = ("is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Task] = []


class Task:
    """A thread that runs while it holds the token.

    Attributes:
        rank: the rank it belongs to; several tasks may share one.
        name: its role on that rank, for instance `main`.
        call: what it runs.
        result: what that returned, None before.
        note: what it last reported about itself.
        token: released by whoever hands the token to this task.
        state: what it is doing.
        awaited: what it waits for, None if it does not.
        describe_awaited: says what it waits or polls for, and from whom.
        since_s: since when it waits, in virtual time.
        timeout_s: how long it waits at most, from `since_s`.
        has_own_timeout: whether the wait itself set `timeout_s`, and not the peer's default.
        error: to be raised in it when it runs again.
    """

    def __init__(self, rank: int, name: str, call: Callable[[], Any]) -> None:
        self.rank = rank
        self.name = name
        self.call = call
        self.result: Any = None
        self.note = ""
        self.token = threading.Lock()
        self.token.acquire()
        self.state = State.READY
        self.awaited: Signal | None = None
        self.describe_awaited: Callable[[], str] | None = None
        self.since_s = 0.0
        self.timeout_s = math.inf
        self.has_own_timeout = False
        self.error: BaseException | None = None

    @property
    def deadline_s(self) -> float:
        """The virtual time at which its wait ends in an error."""
        return self.since_s + self.timeout_s

    @property
    def is_blocked(self) -> bool:
        """Whether only others can make it go on."""
        return self.state in (State.WAITING, State.POLLING)

    def __str__(self) -> str:
        return f"rank {self.rank} [{self.name}]" + (f" ({self.note})" if self.note else "")

    def describe(self, now_s: float) -> str:
        """Say what the task is doing, in one line."""
        if not self.is_blocked or self.describe_awaited is None:
            return f"{self} {self.state.value}"
        return f"{self} {self.state.value} {self.describe_awaited()}, since {now_s - self.since_s:.6g} s"


def describe_tasks(tasks: Iterable[Task], now_s: float) -> str:
    """Say what each task is doing, a line each, at most 16: those that are blocked first."""
    ordered = sorted(tasks, key=lambda task: (not task.is_blocked, task.rank))
    lines = [task.describe(now_s) for task in ordered[:_REPORTED_TASKS]]
    if len(ordered) > _REPORTED_TASKS:
        lines.append(f"and {len(ordered) - _REPORTED_TASKS} more tasks")
    return "\n".join(lines)
