"""The rounds of one schedule on one rank, and what is under way in the present one.

Source: eager-SGD (Li et al.), sec. 4.1.1 and 4.3: consumable operations, persistent schedules, external activation.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hocket.progress.notices import Notices
from hocket.schedule.operation import Compute, Logic, Operation, Receive, Send
from hocket.schedule.schedule import Schedule
from hocket.transport.peer import Array, Lane, Request
from hocket.transport.signals import Connection

__all__ = ["Execution"]

# Data of a round is sent under one of so many numbers, which every transport accepts. They come again only rounds
# later, and then still in order between the same two ranks.
_NUMBERS = 16_384


class Execution:
    """A schedule that is carried out round after round; used by one thread at a time.

    Attributes:
        round: the round that is armed or will be next; so many have ended.
        wanted: the application has triggered the rounds before this one.
        sending: sends that are not done.
        doing: the operation that is looked at or fired, for errors.
    """

    def __init__(self, schedule: Schedule, lane: Lane, connection: Connection) -> None:
        """Make ready for notices; the first round is armed by the first `advance`.

        Args:
            schedule: this rank's.
            lane: of its own, among the ranks of the schedule.
            connection: to their bells.
        """
        self.round = 0
        self.wanted = 0
        self.sending: list[tuple[int, Request]] = []
        self.doing = ""
        self._schedule = schedule
        self._lane = lane
        self._connection = connection
        self._operations = schedule.operations
        index = {operation.name: i for i, operation in enumerate(self._operations)}
        self._dependents: list[list[int]] = [[] for _ in self._operations]
        for i, operation in enumerate(self._operations):
            for name in operation.after:
                self._dependents[index[name]].append(i)
        self._needs = [_needed(operation) for operation in self._operations]
        self._trigger = None if schedule.trigger is None else index[schedule.trigger]
        self._roots = [i for i, needed in enumerate(self._needs) if not needed and i != self._trigger]
        self._last = frozenset(index[name] for name in schedule.last)
        self._notices = {
            i: Notices(lane, operation.source, operation.tag)
            for i, operation in enumerate(self._operations)
            if isinstance(operation, Receive) and operation.data is None
        }
        self._armed = False
        self._receiving: list[tuple[int, int, Request]] = []  # source, operation
        self._ready: deque[int] = deque()
        self._reset()

    def _reset(self) -> None:
        self._fired = bytearray(len(self._operations))
        self._done = bytearray(len(self._operations))
        self._missing = list(self._needs)
        self._last_missing = len(self._last)

    # ------------------------------------------------------------------------------------------ what it does

    def advance(self, sources: frozenset[int] | set[int] | None, received: list[int]) -> bool:
        """Do everything that can be done now; never blocks.

        Args:
            sources: the ranks whose messages may have come; None to look for everybody's.
            received: gets the source of each message that has come.

        Returns:
            Whether a round has ended.

        Raises:
            TransportError: a message failed.
            Exception: a computation failed; whatever it raised.
        """
        first = self.round
        self._look_for_sent()
        self._look_for_notices(sources, received)
        self._look_for_data(sources, received)
        while True:
            if not self._armed and (self._schedule.persistent or self.round < self.wanted):
                self._arm()
            if self._armed and self.round < self.wanted and self._trigger is not None:
                self._fire_once(self._trigger)
            while self._ready:
                self._fire(self._ready.popleft())
            if not self._armed or self._last_missing or self.sending or self._receiving:
                return self.round > first
            self._armed = False
            self.round += 1

    def withdraw(self) -> None:
        """Give up what is posted for rounds that will not come."""
        for _, _, request in self._receiving:
            request.withdraw()
        self._receiving.clear()
        for notices in self._notices.values():
            notices.withdraw()

    def awaited(self) -> list[tuple[int, str]]:
        """Return from whom the present round awaits data, and in which operation."""
        return [(source, self._operations[i].name) for source, i, _ in list(self._receiving)]

    # ----------------------------------------------------------------------------------------- what has come

    def _look_for_sent(self) -> None:
        if self.sending:
            still = []
            for i, request in self.sending:
                self.doing = self._operations[i].name
                if request.done():
                    self._finish(i)
                else:
                    still.append((i, request))
            self.sending = still

    def _look_for_data(self, sources: frozenset[int] | set[int] | None, received: list[int]) -> None:
        come = []
        for entry in self._receiving:
            source, i, request = entry
            if sources is None or source in sources:
                self.doing = self._operations[i].name
                if request.done():
                    come.append(entry)
        for entry in come:
            self._receiving.remove(entry)
            received.append(entry[0])
            self._finish(entry[1])

    def _look_for_notices(self, sources: frozenset[int] | set[int] | None, received: list[int]) -> None:
        for i, notices in self._notices.items():
            if sources is None or notices.source in sources:
                self.doing = self._operations[i].name
                received += [notices.source] * notices.look()
                self._hear(i)

    def _hear(self, i: int) -> None:
        if self._fired[i] and not self._done[i] and self._notices[i].heard >= self.round:
            self._finish(i)

    # --------------------------------------------------------------------------------------------- operations

    def _arm(self) -> None:
        self._armed = True
        self._reset()
        for i in self._roots:
            self._fire_once(i)

    def _fire_once(self, i: int) -> None:
        if not self._fired[i]:
            self._fired[i] = True
            self._ready.append(i)

    def _fire(self, i: int) -> None:
        operation = self._operations[i]
        self.doing = operation.name
        match operation:
            case Send():
                self._send(i, operation)
            case Receive(data=None):
                self._hear(i)
            case Receive():
                assert operation.data is not None
                request = self._lane.irecv(operation.data, operation.source, self._number(operation.tag))
                self._receiving.append((operation.source, i, request))
            case Compute():
                operation.call(self.round)
                self._finish(i)
            case _:
                self._finish(i)

    def _send(self, i: int, operation: Send) -> None:
        data: Array | None = operation.data
        if data is None:
            request = self._lane.isend(np.array([self.round]), operation.to, operation.tag)
        else:
            request = self._lane.isend(data, operation.to, self._number(operation.tag))
        self._connection.ring(operation.to)
        if request.done():
            self._finish(i)
        else:
            self.sending.append((i, request))

    def _finish(self, i: int) -> None:
        self._done[i] = True
        self._last_missing -= i in self._last
        for dependent in self._dependents[i]:
            self._missing[dependent] -= 1
            if self._missing[dependent] <= 0:
                self._fire_once(dependent)

    def _number(self, tag: int) -> int:
        """Return under which number a message of this round is sent; notices have those from 0 to `num_tags`."""
        num_tags = self._schedule.num_tags
        rounds = max(_NUMBERS // num_tags, 2)
        return num_tags * (1 + self.round % rounds) + tag


def _needed(operation: Operation) -> int:
    """Return how many of its dependencies must be done before it fires."""
    if operation.logic is Logic.ANY:
        return min(len(operation.after), 1)
    return len(operation.after)
