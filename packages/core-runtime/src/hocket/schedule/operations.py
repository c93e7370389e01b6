"""The operations that schedules are made of.

Source: Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations"
(eager-SGD), sec. 4.1.1. A message without data, a notice, is ours: there, activation messages are sends and
receives like others, which leaves receives without messages behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from hocket.arrays import Array


class Logic(Enum):
    """The condition for an operation to fire."""

    ALL = "all"
    ANY = "any"


@dataclass(frozen=True, eq=False)
class Operation:
    """A vertex of a schedule. It fires at most once in an execution, and is done once.

    Attributes:
        name: unique within the schedule.
        after: the operations that it depends on; without any it fires when the execution is armed.
        logic: whether all of them must be done before it fires, or any one.
    """

    name: str
    after: tuple[str, ...] = ()
    logic: Logic = Logic.ALL


@dataclass(frozen=True, eq=False)
class NoOp(Operation):
    """An operation without an effect, done when it fires: it builds dependencies."""


@dataclass(frozen=True, eq=False)
class Compute(Operation):
    """An operation that calls a function that does not block, done when it returns.

    Attributes:
        call: called with the round of the execution, on the thread that advances the schedule.
    """

    call: Callable[[int], None] = lambda round: None


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """An addition, total += addend, done at once.

    Attributes:
        total, addend: C-contiguous, of one shape and dtype.
    """

    total: Array = field(kw_only=True)
    addend: Array = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class Gate(Operation):
    """A gate, done once it is open: later operations depend on the round, or on the application's actions.

    Attributes:
        is_open: called with the round of the execution, when the gate fires, and at each look at the schedule
            (`Execution.nudge`) until it returns True, on the thread that advances it; does not block.
    """

    is_open: Callable[[int], bool] = lambda round: True


@dataclass(frozen=True, eq=False)
class _PointToPoint(Operation):
    """A message of this execution's round, or a notice.

    A notice carries no data but the round, and needs no receive: one of an earlier round is dropped, one of a later
    round counts from now on, as that round cannot have begun before this one did.

    Attributes:
        data: C-contiguous, in host memory; None for a notice.
        tag: number of the message between two ranks in one round, equal for sender and receiver.
    """

    data: Array | None = None
    tag: int = 0


@dataclass(frozen=True, eq=False)
class Send(_PointToPoint):
    """A send, done when the buffer may change again.

    Attributes:
        to: the receiving rank.
    """

    to: int = 0


@dataclass(frozen=True, eq=False)
class Receive(_PointToPoint):
    """A receive, posted when it fires, so pre-posted if it has no dependencies; done when the message is received.

    Attributes:
        source: the sending rank.
    """

    source: int = 0
