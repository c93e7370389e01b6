"""The rounds of one schedule on one rank, and what is under way in the present one.

Source: eager-SGD (Li et al.), sec. 4.1.1 and 4.3: consumable operations, persistent schedules, external activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.kernels import program as kernel
from hocket.progress.messages import Messages, Place
from hocket.progress.program import build_program
from hocket.schedule.operation import Add, Compute, Gate, Operation, Receive, Send
from hocket.schedule.schedule import Schedule
from hocket.transport.host.rings import words_of_ring
from hocket.transport.lane import Lane
from hocket.transport.request import Request
from hocket.transport.signals import Connection, Ring

__all__ = ["Execution"]


class Execution:
    """A schedule that is carried out round after round; used by one thread at a time.

    What fires when is the program's affair; here is what it hands to Python. The thread's bell can carry the program on
    by itself, see `Doorbell.serve`.

    Another thread may ask for the round, say how many are wanted, and `tell`.

    Attributes:
        program: the schedule and the state of its round, see `hocket.kernels.program`.
        sending: sends that are not done.
        doing: the operation that is looked at or performed, for errors.
    """

    def __init__(self, schedule: Schedule, lane: Lane, connection: Connection) -> None:
        """Make ready for notices; the first round is armed by the first `advance`.

        Args:
            schedule: this rank's.
            lane: of its own, among the ranks of the schedule.
            connection: to their bells.
        """
        self.program = build_program(schedule, lane.rank, lane.size, connection)
        self.sending: list[tuple[int, Request]] = []
        self.doing = ""
        self._operations = schedule.operations
        self._messages = Messages(schedule, lane, connection)
        self._scratch = np.empty(words_of_ring(connection.largest_bytes), np.int64)
        self._perform = [self._action(i, operation) for i, operation in enumerate(self._operations)]
        self._receives = {
            (operation.source, operation.tag): (i, operation.data)
            for i, operation in enumerate(self._operations)
            if isinstance(operation, Receive)
        }
        self._shut: list[tuple[int, int]] = []  # gates, and the round in which they were asked
        self._num_seen = 0

    # ------------------------------------------------------------------------------------------ what it does

    @property
    def round(self) -> int:
        """The round that is armed or will be next; so many have ended."""
        return int(self.program[kernel.ROUND])

    @property
    def wanted(self) -> int:
        """The application has triggered the rounds before this one."""
        return int(self.program[kernel.WANTED])

    @wanted.setter
    def wanted(self, rounds: int) -> None:
        self.program[kernel.WANTED] = rounds

    def tell(self, telling: bool) -> None:
        """Have a bell that carries the program on return whenever a round ends, or no more."""
        self.program[kernel.TELLING] = telling

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
            rings: what has rung since the last call, but for what the bell has given to the program itself.
            everywhere: look also for messages for which nobody has rung.

        Returns:
            Whether anything has happened since the last call.

        Raises:
            TransportError: a message failed.
            Exception: a computation failed; whatever it raised.
        """
        self.doing = "receive"
        for ring in rings:
            self._take_in(ring)
        for place, round in self._messages.look(everywhere):
            self._note_come(self._receives[place][0], round)
        if self.sending:
            self._look_for_sent()
        if self._shut:
            self._look_at_gates()
        while (i := kernel.go_on(self.program, self._scratch)) != kernel.IDLE:
            if i != kernel.ROUND_ENDED:
                self.doing = self._operations[i].name
                kernel.take(self.program)
                if self._perform[i]():
                    kernel.finish(self.program, i)
        num_seen, self._num_seen = self._num_seen, int(self.program[kernel.NUM_DONE])
        return self._num_seen > num_seen

    def withdraw(self) -> None:
        """Give up what is posted for rounds that will not come."""
        self._messages.withdraw()

    def awaited(self) -> list[tuple[int, str]]:
        """Return from whom the present round awaits data, and in which operation."""
        awaited = [self._receives[place][0] for place in self._messages.awaited()]
        for i, _ in self._receives.values():
            if self._expects(i, self.round):
                awaited.append(i)
        source = {i: place[0] for place, (i, _) in self._receives.items()}
        return [(source[i], self._operations[i].name) for i in awaited]

    # ------------------------------------------------------------------------------------------- how it does it

    def _record(self, i: int) -> Array:
        return self.program[kernel.HEADER + i * kernel.FIELDS :][: kernel.FIELDS]

    def _expects(self, i: int, round: int) -> bool:
        """Return whether a receive waits for what comes with a ring in `round`."""
        record = self._record(i)
        return bool(record[kernel.KIND] == kernel.EXPECT and record[kernel.EXPECTED] == round)

    def _take_in(self, ring: Ring) -> None:
        """Note what rang: for a message on the lane, or with a message."""
        place = (ring.source, ring.message)
        i, data = self._receives[place]
        if ring.data is None:
            self._messages.note_rung(place)
        elif data is None:
            kernel.hear(self.program, i, ring.round)
        elif self._expects(i, ring.round):
            _copy(ring.data, data)
            kernel.arrive(self.program, i)
        else:
            self._messages.keep(place, ring.round, ring.data)
            self._record(i)[kernel.NUM_EARLY] += 1

    def _note_come(self, i: int, round: int | None) -> None:
        """Note that data has come on the lane, or a notice of `round`."""
        if round is None:
            self._end(i)
        else:
            kernel.hear(self.program, i, round)

    def _end(self, i: int) -> None:
        """Note the end of what was under way."""
        self.program[kernel.UNDER_WAY] -= 1
        kernel.finish(self.program, i)

    def _look_for_sent(self) -> None:
        still = []
        for i, request in self.sending:
            self.doing = self._operations[i].name
            if request.done():
                self._end(i)
            else:
                still.append((i, request))
        self.sending = still

    def _look_at_gates(self) -> None:
        """Finish the gates of this round that have opened since they were asked."""
        present = self.round
        shut, self._shut = [(i, round) for i, round in self._shut if round == present], []
        for i, _ in shut:
            self.doing = self._operations[i].name
            if self._perform[i]():
                kernel.finish(self.program, i)

    def _action(self, i: int, operation: Operation) -> Callable[[], bool]:
        """Return what performs an operation that is handed to Python, and returns whether it is done then."""
        match operation:
            case Send():
                return partial(self._send, i, operation)
            case Receive(data=data) if data is not None:
                return partial(self._post, i, (operation.source, operation.tag), data)
            case Compute(call=call):
                return partial(self._compute, call)
            case Add(total=total, addend=addend):
                return partial(_add, total, addend)
            case Gate():
                return partial(self._ask, i, operation.is_open)
            case _:
                return _not_handed

    def _send(self, i: int, operation: Send) -> bool:
        request = self._messages.send(operation.to, operation.tag, self.round, operation.data)
        if request is not None:
            self.sending.append((i, request))
            self.program[kernel.UNDER_WAY] += 1
        return request is None

    def _post(self, i: int, place: Place, data: Array) -> bool:
        if self._record(i)[kernel.KIND] != kernel.EXPECT:
            self._messages.receive(place, self.round, data)
            self.program[kernel.UNDER_WAY] += 1
            return False
        message = self._messages.kept(place, self.round)
        if message is None:
            kernel.expect(self.program, i)
            return False
        _copy(message, data)
        self._record(i)[kernel.NUM_EARLY] -= 1
        return True

    def _compute(self, call: Callable[[int], None]) -> bool:
        call(self.round)
        return True

    def _ask(self, i: int, is_open: Callable[[int], bool]) -> bool:
        round = self.round
        opened = is_open(round)
        if not opened:
            self._shut.append((i, round))
        return opened


def _add(total: Array, addend: Array) -> bool:
    np.add(total, addend, out=total)
    return True


def _not_handed() -> bool:
    raise AssertionError("the program does this itself")


def _copy(message: bytes, data: Array) -> None:
    if len(message) != data.nbytes:
        raise TransportError(f"a message of {len(message)} bytes came into a buffer of {data.nbytes}")
    if message:
        data.reshape(-1).view(np.uint8)[:] = np.frombuffer(message, dtype=np.uint8)
