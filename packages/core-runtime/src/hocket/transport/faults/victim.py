"""The state that one rank's peers and lanes share for faults: its clock, death and messages."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from hocket.transport.faults.config import FaultPlan
from hocket.transport.faults.request import FaultyRequest, clock_of
from hocket.transport.peer import Peer
from hocket.transport.virtual.peer import VirtualPeer
from hocket.transport.wrapper import WrapperPeer

#: Operations of one lane with the same one stay in order.
Key = tuple[int, int]


class Victim:
    """A rank with injected faults.

    Args:
        peer: its endpoint in the world, without faults.
        faults: the faults.

    Attributes:
        clock: holds its operations back.
        steps: number of steps that it has reported.
        held_back: operations of its lanes on devices that have not begun, in order.
    """

    def __init__(self, peer: Peer, faults: FaultPlan) -> None:
        self.faults = faults
        self.clock = clock_of(peer)
        self.steps = 0
        self._peer = peer
        self._uses = 0
        self.held_back: list[tuple[Key, FaultyRequest]] = []
        self._to_be_overtaken: list[FaultyRequest] = []

    def use(self) -> None:
        """Count a use of the transport, and die if the faults say so."""
        kill = self.faults.kill
        if kill is not None and kill.rank == self._peer.rank and self.steps >= kill.step:
            if self._uses == kill.call:
                kill_rank(self._peer)
            self._uses += 1

    def await_overtaking(self, message: FaultyRequest) -> None:
        """Begin `message` when another one has been sent."""
        self._to_be_overtaken.append(message)

    def overtake(self) -> None:
        """Begin the messages that waited for a later one to be sent."""
        messages, self._to_be_overtaken = self._to_be_overtaken, []
        for message in messages:
            message.begin()


def kill_rank(peer: Peer) -> NoReturn:
    """End this rank at once without a message, as a crash does.

    Raises:
        RankKilledError: on a virtual rank, now and at its next use of the transport.
    """
    while isinstance(peer, WrapperPeer):
        peer = peer.held
    if isinstance(peer, VirtualPeer):
        peer.kill()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
