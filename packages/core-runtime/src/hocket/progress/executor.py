"""The executor of a schedule, round after round, on the thread of a progress engine.

Source: eager-SGD (Li et al.), sec. 4.1.1 and 4.3: consumable operations, persistent schedules, external activation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.arrays import Array
from hocket.errors import PeerLostError, TransportError
from hocket.progress.engine import Activity, ProgressEngine
from hocket.schedule.firing import Firing
from hocket.schedule.operations import Add, Compute, Gate, Receive, Send
from hocket.schedule.schedule import Schedule
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer
from hocket.transport.request import FunctionRequest, Request
from hocket.transport.signals import Bells

# The data of a round is sent under one of so many numbers, which every transport accepts. They come again only rounds
# later, and then still in order between the same two ranks.
_NUMBERS = 16_384
# The round of a wake-up for data on the lane; a wake-up of any other round is a notice.
_ON_LANE = -1


class _UnsentMessage(NamedTuple):
    """A message that is not sent yet, or whose receiver is not woken; `ring` is None once it is."""

    operation: int
    request: Request | None
    ring: tuple[int, int, int] | None


class Execution(Activity):
    """An execution of a schedule, round after round, on all ranks of a peer; collective.

    Rounds count from 0 and end in order. With a persistent schedule other ranks can start them too.
    Buffers hold the newest round's results: with a persistent schedule the next round may begin, and overwrite them, as
    soon as one has ended. The schedule's last computation has to copy results that must last.

    Between ranks that can wake each other a notice is a wake-up; all else are messages on the lane, announced by
    wake-ups. `start`, `ended`, `wait`, `nudge` and `close` are the application's, the rest the engine's.

    Args:
        schedule: this rank's part.
        peer: this rank's endpoint among the ranks that the schedule counts.
        progress: the engine that advances it.
        name: stands in messages, for instance `gradients.0[3]`.
    """

    def __init__(self, schedule: Schedule, peer: Peer, progress: ProgressEngine, name: str) -> None:
        self._schedule, self._name, self._progress = schedule, name, progress
        self._operations = schedule.operations
        self._firing = Firing(schedule)
        self._receives = {
            (operation.source, operation.tag): i
            for i, operation in enumerate(self._operations)
            if isinstance(operation, Receive)
        }
        self._trigger = next(
            (i for i, op in enumerate(self._operations) if op.name == schedule.trigger), None
        )
        self._round = 0
        self._wanted = 0  # the application has triggered the rounds before this one
        self._armed = False
        self._gates: list[int] = []  # of this round, that were shut when they were asked
        # By receive, the newest round with a notice, plus 1.
        self._heard = [0] * len(self._operations)
        self._notices: dict[int, tuple[Array, Request]] = {}  # receives of notices on the lane
        self._receiving: dict[int, Request] = {}
        self._sending: list[_UnsentMessage] = []
        # By receive, wake-ups less messages found, where not 0; a message can be found before its wake-up.
        self._rung: dict[int, int] = {}
        self._num_done = 0
        self._doing = ""  # for errors
        self._triggered = np.zeros(peer.size, np.int64)
        self._agreement: Request | None = None
        self._final: int | None = None
        self._closing = self._closed = False
        self._lane: Lane
        self._connection: Bells | None = None
        progress.open(self, peer, name)

    # -------------------------------------------------------------------------------- from any thread of the rank

    @property
    def num_ended(self) -> int:
        """Return the number of rounds that have ended on this rank."""
        return self._round

    def start(self, round: int) -> Request[int]:
        """Announce that the application has arrived at `round` (internal activation); never blocks.

        If the round has ended without it, or is under way, that changes nothing.

        Returns:
            A request that is done when the round has ended on this rank, with the round's number.

        Raises:
            TransportError: an execution has failed.
        """
        self._progress.check()
        if round >= self._round:
            self._wanted = max(self._wanted, round + 1)
            self._progress.nudge()
        return FunctionRequest(
            lambda: self.ended(round), lambda timeout_s: self.wait(round, timeout_s), lambda: round
        )

    def nudge(self) -> None:
        """Wake the engine to check the schedule's gates; never blocks."""
        self._progress.nudge()

    def ended(self, round: int) -> bool:
        """Return whether `round` has ended on this rank.

        Raises:
            TransportError: an execution has failed.
        """
        self._progress.check()
        return self._round > round

    def wait(self, round: int, timeout_s: float | None = None) -> None:
        """Block until `round` has ended on this rank, without burning a core.

        Raises:
            ExchangeTimeoutError: not in time; names exchange, round and the ranks of missing messages.
            TransportError: an execution has failed.
        """
        what = f"round {round}"
        self._progress.wait_until(
            lambda: self._round > round, what, self._name, lambda: self._describe(what), timeout_s
        )

    def close(self) -> None:
        """Answer the other ranks until all have closed, then release the schedule's resources; collective.

        The ranks exchange the numbers of rounds that they have triggered. Each continues until it has ended the largest
        number; then no round can be under way any more, and receives posted ahead are withdrawn.

        Raises:
            ExchangeTimeoutError: a rank has not closed in time.
            TransportError: an execution has failed.
        """
        if self._closed:
            return
        self._closing = True
        self._progress.nudge()
        what = "the end"
        self._progress.wait_until(lambda: self._closed, what, self._name, lambda: self._describe(what), None)
        self._progress.forget(self)
        self._lane.close()

    def _describe(self, what: str) -> str:
        awaited = [
            f"rank {source} ({self._operations[i].name!r})"
            for (source, _), i in self._receives.items()
            if i in self._receiving
        ]
        lacks = f"waits for a message of {', '.join(awaited)}" if awaited else "has not begun"
        return f"{what} of {self._name}: on this rank round {self._round} {lacks}"

    # ------------------------------------------------------------------------------------- from the engine's thread

    def begin(self, lane: Lane, connection: Bells) -> None:
        self._lane = lane
        for (source, _), i in self._receives.items():
            operation = self._operations[i]
            if isinstance(operation, Receive) and operation.data is None and not connection.hears(source):
                self._post_notice(i, operation)
        self.unheard = any(not connection.hears(source) for source, _ in self._receives)
        self._connection = connection

    def note_rung(self, message: int, round: int) -> None:
        i = self._receives[divmod(message, self._schedule.num_tags)]
        if round == _ON_LANE:
            self._count_rung(i, 1)
        else:
            self._hear(i, round)

    @property
    def in_flight(self) -> bool:
        return not self._closed and (
            bool(self._sending)
            or any(n > 0 and (i in self._receiving or i in self._notices) for i, n in self._rung.items())
            or (self._agreement is not None and self._final is None)
        )

    def advance(self, everywhere: bool) -> bool:
        if self._closed or self._connection is None:
            return False
        num_done = self._num_done
        try:
            self._doing = "receive"
            self._look(everywhere)
            self._look_for_sent()
            self._look_at_gates()
            self._go_on()
            return (self._closing and self._close()) or self._num_done > num_done
        except PeerLostError:
            raise
        except Exception as error:
            raise TransportError(
                f"rank {self._lane.rank}: {self._name} failed in round {self._round} at operation {self._doing!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _count_rung(self, i: int, change: int) -> None:
        count = self._rung.pop(i, 0) + change
        if count:
            self._rung[i] = count

    def _look(self, everywhere: bool) -> None:
        """Handle messages on the lane: all, or those that a wake-up has announced."""
        if not (everywhere or self._rung):
            return
        rung = [i for i, count in self._rung.items() if count > 0]
        for i in (*self._notices, *self._receiving) if everywhere else rung:
            if i in self._notices:
                buffer, request = self._notices[i]
                if request.done():
                    self._count_rung(i, -1)
                    round = int(buffer[0])
                    operation = self._operations[i]
                    assert isinstance(operation, Receive)
                    self._post_notice(i, operation)
                    self._hear(i, round)
            elif i in self._receiving and self._receiving[i].done():
                self._count_rung(i, -1)
                del self._receiving[i]
                self._finish(i)

    def _look_for_sent(self) -> None:
        sending, self._sending = self._sending, []
        for message in sending:
            self._doing = self._operations[message.operation].name
            if self._is_sent(message):
                self._finish(message.operation)

    def _look_at_gates(self) -> None:
        """Check the gates of this round again."""
        gates, self._gates = self._gates, []
        for i in gates:
            self._perform(i)

    def _go_on(self) -> None:
        """Perform the operations that have fired, round after round, until one has to wait."""
        firing = self._firing
        while True:
            if not self._armed and (self._schedule.persistent or self._round < self._wanted):
                self._armed = True
                firing.arm()
            if self._armed and self._round < self._wanted and self._trigger is not None:
                firing.fire(self._trigger)
            while firing.queue:
                self._perform(firing.queue.popleft())
            if not (self._armed and firing.over) or self._sending or self._receiving:
                return
            self._armed = False
            self._gates = []
            self._round += 1

    def _perform(self, i: int) -> None:
        """Perform an operation, and finish it if it is complete."""
        operation = self._operations[i]
        self._doing = operation.name
        finished = True
        match operation:
            case Send():
                finished = self._is_sent(self._send(i, operation))
            case Receive(data=None):
                finished = self._heard[i] > self._round and i not in self._firing.done
            case Receive(data=data, source=source, tag=tag) if data is not None:
                self._receiving[i] = self._lane.irecv(data, source, self._number(tag))
                finished = False
            case Compute(call=call):
                call(self._round)
            case Add(total=total, addend=addend):
                np.add(total, addend, out=total)
            case Gate(is_open=is_open):
                finished = is_open(self._round)
                if not finished:
                    self._gates.append(i)
        if finished:
            self._finish(i)

    def _finish(self, i: int) -> None:
        self._num_done += 1
        self._firing.finish(i)

    def _send(self, i: int, operation: Send) -> _UnsentMessage:
        """Begin to send data or a notice."""
        to, tag, data = operation.to, operation.tag, operation.data
        assert self._connection is not None
        reached = self._connection.reaches(to)
        number = self._lane.rank * self._schedule.num_tags + tag
        if data is None:
            if reached:
                return _UnsentMessage(i, None, (to, number, self._round))
            return _UnsentMessage(i, self._lane.isend(np.array([self._round]), to, tag), None)
        request = self._lane.isend(data, to, self._number(tag))
        return _UnsentMessage(i, request, (to, number, _ON_LANE) if reached else None)

    def _is_sent(self, message: _UnsentMessage) -> bool:
        """Return whether a message is sent; keep it to look again if not."""
        assert self._connection is not None
        if message.ring is not None and not self._connection.ring(*message.ring):
            self._sending.append(message)
            return False
        if message.request is None or message.request.done():
            return True
        self._sending.append(message._replace(ring=None))
        return False

    def _number(self, tag: int) -> int:
        """Return the lane's number for data with a tag; notices have those below `num_tags`."""
        num_tags = self._schedule.num_tags
        return num_tags * (1 + self._round % max(_NUMBERS // num_tags, 2)) + tag

    def _post_notice(self, i: int, operation: Receive) -> None:
        """Post the receive of the next notice.

        One receive takes the notices of all rounds, so that none is left behind by a round that did not need it.
        """
        buffer = np.zeros(1, np.int64)
        self._notices[i] = buffer, self._lane.irecv(buffer, operation.source, operation.tag)

    def _hear(self, i: int, round: int) -> None:
        """Handle a notice; the newest counts."""
        self._heard[i] = max(self._heard[i], round + 1)
        firing = self._firing
        fired = self._armed and i in firing.fired and i not in firing.done
        if fired and self._heard[i] > self._round:
            self._finish(i)

    def _close(self) -> bool:
        """Continue closing, and return whether it is done."""
        if self._agreement is None:
            own = np.zeros_like(self._triggered)
            own[self._lane.rank] = self._wanted
            self._agreement = self._lane.iallreduce(own, self._triggered)
        if self._final is None and self._agreement.done():
            self._final = int(self._triggered.max())
        if self._final is not None and self._round >= self._final:
            for request in (*self._receiving.values(), *(request for _, request in self._notices.values())):
                request.withdraw()
            self._closed = True
        return self._closed
