"""A thread of a virtual world, and what it can wait for."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Signal", "State", "Task"]


class State(enum.Enum):
    """What a task is doing."""

    READY = "is ready to run"
    RUNNING = "computes"
    WAITING = "waits"
    POLLING = "polls"
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
        name: its role on that rank, for instance `training`.
        ended: set when its function has returned or raised.
        result: what its function returned, None before.
        note: what it last reported about itself, for stall reports.
    """

    def __init__(self, rank: int, name: str, call: Callable[[], Any]) -> None:
        self.rank = rank
        self.name = name
        self.call = call
        self.ended = Signal()
        self.result: Any = None
        self.note = ""
        self.state = State.READY
        self.token = threading.Lock()  # released by whoever hands the token to this task
        self.token.acquire()
        self.awaited: Signal | None = None
        self.describe_awaited: Callable[[], str] | None = None
        self.deadline_s = math.inf
        self.timeout_s = math.inf
        self.has_own_deadline = False  # a timeout that the call gave, not the peer's default
        self.waiting_since_s = 0.0
        self.error: BaseException | None = None  # raised when the task runs again

    def describe(self, now_s: float) -> str:
        """Say what the task is doing, in one line."""
        doing = self.state.value
        if self.state is State.WAITING and self.describe_awaited is not None:
            doing = f"waits since {now_s - self.waiting_since_s:.6g} s for {self.describe_awaited()}"
        note = f" ({self.note})" if self.note else ""
        return f"rank {self.rank} [{self.name}]{note} {doing}"
