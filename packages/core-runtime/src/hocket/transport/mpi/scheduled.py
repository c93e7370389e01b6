"""Collectives by messages of MPI, where MPI's own are slower: each look performs the operations that have fired."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from hocket.arrays import Array
from hocket.errors import TransportError
from hocket.schedule.operations import Add, Receive, Send
from hocket.transport.host import ProcessLane
from hocket.transport.pending import PendingCall
from hocket.transport.program import Program
from hocket.transport.request import Request


class ScheduledCall(PendingCall):
    """One execution of a program; every wait of the rank advances it.

    Args:
        program: one that is not in use.
        number: its number among the lane's programs.
        send, receive: begin a message with its data, the other rank, and its number among those of the lane.
    """

    _lane: ProcessLane

    def __init__(
        self,
        lane: ProcessLane,
        what: str,
        program: Program,
        number: int,
        send: Callable[[Array, int, int], Request],
        receive: Callable[[Array, int, int], Request],
    ) -> None:
        super().__init__(lane, what)
        self._program, self._number = program, number
        self._send, self._receive = send, receive
        self._messages: dict[int, Request] = {}  # under way, by their operation
        self._finished = False
        self._error: TransportError | None = None
        # A progress thread carries it on, and so does whoever waits for anything: one of them at a time.
        self._lock = threading.Lock()
        program.begin()
        lane.peer.progress.add(self.advance)

    def done(self) -> bool:
        finished = self.advance()
        if self._error is not None:
            raise self._error
        return finished

    def advance(self) -> bool:
        """Perform what is possible now; return whether it has ended, with success or not."""
        if not self._finished and self._lock.acquire(blocking=False):
            try:
                self._go_on()
            except TransportError as error:
                self._error, self._finished = error, True
            finally:
                self._lock.release()
        return self._finished

    def _go_on(self) -> None:
        program = self._program
        firing = program.firing
        for i in [i for i, message in self._messages.items() if message.done()]:
            del self._messages[i]
            firing.finish(i)
        while firing.queue:
            self._perform(firing.queue.popleft())
        if program.over and not self._finished:
            program.in_use = False
            self._finished = True

    def _perform(self, i: int) -> None:
        program = self._program
        first = self._number * program.num_tags
        match program.operations[i]:
            case Send(to=to, tag=tag):
                self._messages[i] = self._send(program.messages[i], to, first + tag)
                return
            case Receive(source=source, tag=tag):
                self._messages[i] = self._receive(program.messages[i], source, first + tag)
                return
            case Add(total=total, addend=addend):
                with np.errstate(all="ignore"):
                    np.add(total, addend, out=total)
        program.firing.finish(i)
