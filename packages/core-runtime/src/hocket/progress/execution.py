"""The rounds of one schedule on one rank, and what is under way in the present one.

Source: eager-SGD (Li et al.), sec. 4.1.1 and 4.3: consumable operations, persistent schedules, external activation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hocket.progress.messages import Messages, Place
from hocket.schedule.operation import Compute, Gate, Logic, Operation, Receive, Send
from hocket.schedule.schedule import Schedule
from hocket.transport.peer import Array, Lane, Request
from hocket.transport.signals import Connection, Ring

__all__ = ["Execution"]


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
        self._messages = Messages(schedule, lane, connection)
        self._operations = schedule.operations
        index = {operation.name: i for i, operation in enumerate(self._operations)}
        self._dependents: list[list[int]] = [[] for _ in self._operations]
        for i, operation in enumerate(self._operations):
            for name in operation.after:
                self._dependents[index[name]].append(i)
        self._actions = [self._action(i, operation) for i, operation in enumerate(self._operations)]
        self._needs = [_needed(operation) for operation in self._operations]
        self._trigger = None if schedule.trigger is None else index[schedule.trigger]
        self._roots = [i for i, needed in enumerate(self._needs) if not needed and i != self._trigger]
        self._last = frozenset(index[name] for name in schedule.last)
        self._receives = {
            (operation.source, operation.tag): i
            for i, operation in enumerate(self._operations)
            if isinstance(operation, Receive)
        }
        self._armed = False
        self._num_receiving = 0
        self._ready: deque[int] = deque()
        self._reset()

    def _reset(self) -> None:
        self._fired = bytearray(len(self._operations))
        self._done = bytearray(len(self._operations))
        self._missing = list(self._needs)
        self._last_missing = len(self._last)
        self._shut: list[int] = []

    # ------------------------------------------------------------------------------------------ what it does

    @property
    def in_flight(self) -> bool:
        """Whether something is known to be under way that no bell will tell the end of."""
        return bool(self.sending) or self._messages.in_flight

    @property
    def unheard(self) -> bool:
        """Whether messages of some ranks must be looked for, as they cannot ring."""
        return self._messages.unheard

    def advance(self, rings: Sequence[Ring], everywhere: bool) -> bool:
        """Do everything that can be done now; never blocks.

        Args:
            rings: what has rung since the last call.
            everywhere: look also for messages for which nobody has rung.

        Returns:
            Whether anything has happened.

        Raises:
            TransportError: a message failed.
            Exception: a computation failed; whatever it raised.
        """
        self.doing = "receive"
        come = self._messages.collect(rings, everywhere)
        for place in come:
            self._receive(place)
        moved = bool(come)
        if self.sending:
            moved |= self._look_for_sent()
        while True:
            if not self._armed and (self._schedule.persistent or self.round < self.wanted):
                self._arm()
            if self._armed and self.round < self.wanted and self._trigger is not None:
                self._fire_once(self._trigger)
            if self._shut:
                self._look_at_gates()
            moved |= bool(self._ready)
            while self._ready:
                i = self._ready.popleft()
                action = self._actions[i]
                self.doing = self._operations[i].name
                if action is None or action():
                    self._finish(i)
            if not self._armed or self._last_missing or self.sending or self._num_receiving:
                return moved
            self._armed = False
            self.round += 1

    def withdraw(self) -> None:
        """Give up what is posted for rounds that will not come."""
        self._messages.withdraw()

    def awaited(self) -> list[tuple[int, str]]:
        """Return from whom the present round awaits data, and in which operation."""
        return [
            (place[0], self._operations[self._receives[place]].name) for place in self._messages.awaited()
        ]

    # ------------------------------------------------------------------------------------------- how it does it

    def _look_for_sent(self) -> bool:
        """Return whether a send is done that was not."""
        still = []
        before = len(self.sending)
        for i, request in self.sending:
            self.doing = self._operations[i].name
            if request.done():
                self._finish(i)
            else:
                still.append((i, request))
        self.sending = still
        return len(still) < before

    def _look_at_gates(self) -> None:
        """Finish the gates that have opened since they fired."""
        shut, self._shut = self._shut, []
        for i in shut:
            self.doing = self._operations[i].name
            action = self._actions[i]
            if action is not None and action():
                self._finish(i)

    def _receive(self, place: Place) -> None:
        """Note that something has come: data, or a notice, which may be of another round."""
        i = self._receives[place]
        if place not in self._messages.heard:
            self._num_receiving -= 1
            self._finish(i)
        elif self._fired[i] and not self._done[i] and self._messages.heard[place] >= self.round:
            self._finish(i)

    def _arm(self) -> None:
        self._armed = True
        self._reset()
        for i in self._roots:
            self._fire_once(i)

    def _fire_once(self, i: int) -> None:
        if not self._fired[i]:
            self._fired[i] = True
            self._ready.append(i)

    def _action(self, i: int, operation: Operation) -> Callable[[], bool] | None:
        """Return what firing an operation does, and whether it is done then; None for nothing at all."""
        match operation:
            case Send():
                return partial(self._send, i, operation)
            case Receive():
                return partial(self._post, (operation.source, operation.tag), operation.data)
            case Compute():
                return partial(self._compute, operation.call)
            case Gate():
                return partial(self._ask, i, operation.is_open)
            case _:
                return None

    def _send(self, i: int, operation: Send) -> bool:
        request = self._messages.send(operation.to, operation.tag, self.round, operation.data)
        if request is not None:
            self.sending.append((i, request))
        return request is None

    def _post(self, place: Place, data: Array | None) -> bool:
        if data is None:
            return self._messages.heard[place] >= self.round
        done = self._messages.post(place, self.round, data)
        self._num_receiving += not done
        return done

    def _compute(self, call: Callable[[int], None]) -> bool:
        call(self.round)
        return True

    def _ask(self, i: int, is_open: Callable[[int], bool]) -> bool:
        opened = is_open(self.round)
        if not opened:
            self._shut.append(i)
        return opened

    def _finish(self, i: int) -> None:
        self._done[i] = True
        self._last_missing -= i in self._last
        for dependent in self._dependents[i]:
            self._missing[dependent] -= 1
            if self._missing[dependent] <= 0:
                self._fire_once(dependent)


def _needed(operation: Operation) -> int:
    """Return how many of its dependencies must be done before it fires."""
    if operation.logic is Logic.ANY:
        return min(len(operation.after), 1)
    return len(operation.after)
