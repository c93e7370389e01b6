"""Operations over the wire: messages, gatherings, and collectives as schedules."""

from __future__ import annotations

from functools import partial

import numpy as np

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.schedule.operations import Add, Receive, Send
from hocket.transport.gathering import gathered
from hocket.transport.host import HostPeer, ProcessLane
from hocket.transport.pending import PendingCall
from hocket.transport.program import NOTHING, Program
from hocket.transport.request import RANKS_DIVERGED, T_co
from hocket.transport.tcp.connection import Frame, FrameKind
from hocket.transport.tcp.wire import Key, Wire
from hocket.transport.waiting import CHECK_EVERY_S, LONG_WAIT_S

# The messages of one collective are numbered below this.
_TAGS = 1 << 20


class WireLane(ProcessLane):
    """A lane over a wire.

    Args:
        wire: carries its messages.
        calls: the space of its collectives' messages.
    """

    def __init__(self, peer: HostPeer, name: str, wire: Wire, calls: int) -> None:
        super().__init__(peer, name)
        self.wire = wire
        self._calls = calls

    def call_key(self, rank: int, round: int, tag: int = 0) -> Key:
        """Return the key of a message of a collective, to or from `rank` of the lane."""
        return Key(self._calls, self.peer.world_ranks[rank], round * _TAGS + tag)


class TcpOperation(PendingCall[T_co]):
    """An operation that any look at the wire advances until `finish` is called: a send, or the base of others."""

    __slots__ = ("_error", "_finished")

    _yields = True
    _lane: WireLane

    def __init__(self, lane: WireLane, what: str, other: int | None = None) -> None:
        super().__init__(lane, what, other)
        self._finished = False
        self._error = ""
        lane.peer.progress.begin_message()

    def done(self) -> bool:
        if not self._finished:
            wire = self._lane.wire
            wire.advance()
            if not self._finished:
                if wire.lost:
                    raise self._lane.peer.status.failures.lost(self._describe(), wire.lost)
                return False
        if self._error:
            raise TransportError(f"{self._describe()}: {self._error}: {RANKS_DIVERGED}")
        return True

    def finish(self) -> None:
        """Note that it is over."""
        self._finished = True
        self._lane.peer.progress.end_message()

    def _fail(self, error: str) -> None:
        """Note that it has failed."""
        self._error = error
        self.finish()

    def _may_be_brief(self) -> bool:
        return self._lane.last_wait_s < LONG_WAIT_S

    def _sleep(self, longest_s: float) -> None:
        """Sleep until a connection is ready, at most for `longest_s` seconds, as shared memory may need looks."""
        busy = self._lane.peer.progress.busy
        self._lane.wire.sleep(self._is_finished, longest_s if busy else CHECK_EVERY_S)

    def _is_finished(self) -> bool:
        return self._finished


class ReceiveRequest(TcpOperation):
    """A message from another rank.

    Args:
        key: of the message.
        data: uint8, its buffer.
        source: the rank of the lane that it comes from.
    """

    __slots__ = ("_data", "_key")

    def __init__(self, lane: WireLane, what: str, key: Key, data: Array, source: int) -> None:
        super().__init__(lane, what, source)
        self._key, self._data = key, data
        lane.wire.post(key, self)

    def place(self, frame: Frame) -> Array | None:
        if frame.nbytes == self._data.nbytes:
            return self._data
        self._fail(f"received a message of {frame.nbytes} bytes, but the buffer has {self._data.nbytes}")
        return None

    def arrived(self) -> None:
        self.finish()

    def withdraw(self) -> None:
        with self._lane.wire.lock:
            if not self._finished:
                self._lane.wire.withdraw(self._key, self)
                self.finish()


class GatherRequest(TcpOperation[list[Array]]):
    """A gathering of messages of different lengths: each is sent to all other ranks.

    Args:
        call: a word on the call, equal on all ranks.
        round: its number among the lane's collectives.
        send: uint8 [n], this rank's message.
        receive: uint8 [size, capacity].
    """

    __slots__ = ("_lengths", "_missing", "_receive")

    def __init__(self, lane: WireLane, what: str, call: int, round: int, send: Array, receive: Array) -> None:
        super().__init__(lane, what)
        self._receive = receive
        self._lengths = [0] * lane.size
        self._lengths[lane.rank] = send.size
        self._missing = 2 * (lane.size - 1) + 1  # and what is counted last
        receive[lane.rank, : send.size] = send
        with lane.wire.lock:
            # The next rank first, so that not all send to the same one.
            for other in [*range(lane.rank + 1, lane.size), *range(lane.rank)]:
                key = lane.call_key(other, round)
                if lane.wire.send(key, send, call, self.count_one):
                    self._missing -= 1
                lane.wire.post(key, _Row(self, other, call))
            self.count_one()

    def row(self, rank: int, nbytes: int) -> Array | None:
        """Return the place of a rank's message of `nbytes` bytes, None if there is no room."""
        self._lengths[rank] = nbytes
        if nbytes <= self._receive.shape[1]:
            return self._receive[rank, :nbytes]
        self.refuse(
            f"rank {self._lane.peer.world_ranks[rank]} sends {nbytes} bytes, but this rank's receive "
            f"buffer has room for {self._receive.shape[1]} (give every rank the same capacity)"
        )
        return None

    def refuse(self, error: str) -> None:
        """Fail as a rank's message cannot be taken."""
        if not self._finished:
            self._fail(error)

    def count_one(self) -> None:
        """Note that one more message is sent, or received."""
        self._missing -= 1
        if not self._missing and not self._finished:
            self.finish()

    @property
    def result(self) -> list[Array]:
        return gathered(self._receive, self._lengths)


class _Row:
    """The receive of one rank's message in a gathering."""

    __slots__ = ("_call", "_gathering", "_rank")

    def __init__(self, gathering: GatherRequest, rank: int, call: int) -> None:
        self._gathering, self._rank, self._call = gathering, rank, call

    def place(self, frame: Frame) -> Array | None:
        if frame.call == self._call:
            return self._gathering.row(self._rank, frame.nbytes)
        self._gathering.refuse(another_call(self._gathering._lane, self._rank))
        return None

    def arrived(self) -> None:
        self._gathering.count_one()


class CollectiveCall(TcpOperation):
    """One execution of a program.

    Args:
        program: one that is not in use.
        round: its number among the lane's collectives.
        other: the root of a broadcast; None where all wait for all.
    """

    __slots__ = ("_performing", "_program", "_round")

    def __init__(
        self, lane: WireLane, what: str, program: Program, round: int, other: int | None = None
    ) -> None:
        super().__init__(lane, what, other)
        self._program = program
        self._round = round
        self._performing = False
        with lane.wire.lock:
            program.begin()
            self._go_on()

    def finish_part(self, i: int) -> None:
        """Note that a message is sent, or received, and continue."""
        self._program.firing.finish(i)
        self._go_on()

    def fail_part(self, error: str) -> None:
        """Fail as a message cannot be taken, and notify ranks that still expect one of this rank."""
        if self._finished:
            return
        self._fail(error)
        lane, program = self._lane, self._program
        for i, operation in enumerate(program.operations):
            if isinstance(operation, Send) and (i in program.firing.queue or i not in program.firing.fired):
                key = lane.call_key(operation.to, self._round, operation.tag)
                lane.wire.send(key, NOTHING, program.call, _ignore, FrameKind.GIVEN_UP)

    def _go_on(self) -> None:
        """Perform the operations that have fired; a nested call leaves them to the outer one."""
        if self._performing or self._finished:
            return
        self._performing = True
        firing = self._program.firing
        try:
            while firing.queue and not self._finished:
                i = firing.queue.popleft()
                if self._perform(i):
                    firing.finish(i)
        finally:
            self._performing = False
        if self._program.over and not self._finished:
            self._program.in_use = False
            self.finish()

    def _perform(self, i: int) -> bool:
        """Perform an operation; return whether it is complete."""
        lane, program = self._lane, self._program
        match program.operations[i]:
            case Send(to=to, tag=tag):
                key = lane.call_key(to, self._round, tag)
                return lane.wire.send(key, program.messages[i], program.call, partial(self.finish_part, i))
            case Receive(source=source, tag=tag):
                part = _MessageReceive(self, i, program.messages[i], source, program.call)
                lane.wire.post(lane.call_key(source, self._round, tag), part)
                return False
            case Add(total=total, addend=addend):
                with np.errstate(all="ignore"):
                    np.add(total, addend, out=total)
        return True


class _MessageReceive:
    """The receive of one message of a collective."""

    __slots__ = ("_call", "_collective", "_data", "_number", "_source")

    def __init__(self, collective: CollectiveCall, number: int, data: Array, source: int, call: int) -> None:
        self._collective, self._number, self._data = collective, number, data
        self._source, self._call = source, call

    def place(self, frame: Frame) -> Array | None:
        collective = self._collective
        if frame.call != self._call:
            collective.fail_part(another_call(collective._lane, self._source))
        elif frame.kind is FrameKind.GIVEN_UP:
            rank = collective._lane.peer.world_ranks[self._source]
            collective.fail_part(f"rank {rank} has failed in this call")
        # What comes for a call that has failed goes nowhere.
        return None if collective._finished else self._data

    def arrived(self) -> None:
        self._collective.finish_part(self._number)


def _ignore() -> None:
    pass


def another_call(lane: WireLane, rank: int) -> str:
    """Return an error that a rank of the lane makes another call."""
    return f"rank {lane.peer.world_ranks[rank]} made another call here, or used another size or dtype"
