"""The unfinished operations of a rank, which any of its waits advances, and the base of those of processes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Protocol

from hocket.transport import forks
from hocket.transport.request import Request, T_co
from hocket.transport.status import WaitSite
from hocket.transport.waiting import back_off_s, never, poll_briefly, wait


class Progress:
    """The registry of a rank's unfinished operations; a wait for one advances them all.

    Other ranks need this rank's share of each, and may wait for them in another order. A rank has one, in the world and
    all of its groups. On `virtual` it stays empty, as the simulation ends operations.

    An operation is kept as a function that advances it without waiting, and returns whether other ranks need nothing
    more of it.

    Args:
        move_messages: a look at the transport that moves its messages; None if they move by themselves.
    """

    def __init__(self, move_messages: Callable[[], object] | None = None) -> None:
        self._move_messages = move_messages
        self._unfinished: dict[Callable[[], bool], None] = {}  # in the order of additions
        self._dropped: deque[Callable[[], bool]] = deque()
        self._messages = 0
        self._counting = threading.Lock()
        # One thread advances at a time; a wait within what it advances does not.
        self._advancing = threading.Lock()

    def add(self, advance: Callable[[], bool]) -> None:
        """Advance an operation in every wait, from now on until it is done."""
        if not advance():
            self._unfinished[advance] = None

    def keep(self, advance: Callable[[], bool]) -> None:
        """Keep an operation that its caller has dropped until it is done; cheap, as `__del__` calls it."""
        self._dropped.append(advance)

    def begin_message(self) -> None:
        """Note a message under way that needs looks to move, and look at one dropped operation."""
        self._count_messages(1)
        if self._dropped:
            self._if_alone(self._look_at_a_dropped_one)

    def end_message(self) -> None:
        """Note that a message is under way no longer."""
        self._count_messages(-1)

    def move_messages(self) -> None:
        """Move the rank's messages, if there are any."""
        if self._messages and self._move_messages is not None:
            self._move_messages()

    @property
    def busy(self) -> bool:
        """Tell whether any operation is not done."""
        return bool(self._unfinished or self._dropped)

    def is_only(self, advance: Callable[[], bool]) -> bool:
        """Return whether the operation of `advance` is the only unfinished one, messages included."""
        return not self._messages and list(self._unfinished) == [advance]

    def advance(self) -> None:
        """Look once at each unfinished operation, and at one dropped one.

        Does nothing if another thread does so, or if called from within.

        Raises:
            TransportError: an operation failed.
        """
        if self.busy:
            self._if_alone(self._look)

    def _if_alone(self, look: Callable[[], None]) -> None:
        """Call `look` unless it is being called."""
        if self._advancing.acquire(blocking=False):
            try:
                look()
            finally:
                self._advancing.release()

    def _look(self) -> None:
        for advance in list(self._unfinished):  # what advances may add others
            if advance():
                self._unfinished.pop(advance, None)
        self._look_at_a_dropped_one()

    def _look_at_a_dropped_one(self) -> None:
        """Look at the next dropped operation in turn, as a look at one moves all messages."""
        if self._dropped:
            advance = self._dropped.popleft()
            if not advance():
                self._dropped.append(advance)

    def _count_messages(self, more: int) -> None:
        with self._counting:
            self._messages += more


class _Status(Protocol):
    """The part of a rank's status that a wait reports to and asks; see `HostStatus`."""

    def note_waiting(self, what: str, lane: str) -> None: ...

    def note_computing(self) -> None: ...

    def check(self, where: Callable[[], str]) -> None: ...

    def describe_stall(self, site: WaitSite, outcome: str) -> str: ...


class _WaitingPeer(Protocol):
    """The part of a rank's endpoint that a wait needs; see `HostPeer`."""

    timeout_s: float
    progress: Progress
    world_ranks: list[int]

    @property
    def status(self) -> _Status: ...

    @property
    def world_rank(self) -> int: ...


class _WaitingLane(Protocol):
    """The part of a lane that a wait needs; see `ProcessLane`."""

    name: str
    rank: int
    size: int
    last_wait_s: float

    @property
    def peer(self) -> _WaitingPeer: ...


class PendingCall(Request[T_co]):
    """An operation on a lane of ranks that are processes, with its wait.

    Args:
        lane: the lane.
        what: the operation, for messages.
        other: the rank at the other end of a message, or the root of a broadcast; None where all wait for all.
    """

    __slots__ = ("_lane", "_other", "_what")

    _yields: ClassVar[bool] = False

    def __init__(self, lane: _WaitingLane, what: str, other: int | None = None) -> None:
        if forks.forked:
            raise forks.explain()
        self._lane = lane
        self._what = what
        self._other = other

    def wait(self, timeout_s: float | None = None, is_in_vain: Callable[[], bool] = never) -> T_co:
        """Block until done; see `Request.wait`.

        Args:
            timeout_s: seconds to wait at most; the peer's own where None.
            is_in_vain: called now and then; returns whether to give up as after the timeout.
        """
        if forks.forked:
            raise forks.explain()
        peer = self._lane.peer
        look = self._look if peer.progress.busy else self.done
        if look():
            return self.result
        if self._may_be_brief() and poll_briefly(look, self._yields):
            return self.result
        peer.status.note_waiting(self._what, self._lane.name)
        timeout_s = peer.timeout_s if timeout_s is None else timeout_s

        def sleep(waited_s: float, longest_s: float) -> None:
            self._sleep(min(back_off_s(waited_s), longest_s))

        self._lane.last_wait_s = wait(
            self._look_around, timeout_s, self._describe_stall, sleep, is_in_vain=is_in_vain
        )
        peer.status.note_computing()
        return self.result

    def _may_be_brief(self) -> bool:
        """Return whether to poll without a pause at first, which may cost other ranks their core."""
        return True

    def _sleep(self, longest_s: float) -> None:
        """Sleep before another look, at most for `longest_s`."""
        time.sleep(longest_s)

    def _look(self) -> bool:
        """Advance all operations that other ranks need, and return whether this one is done."""
        self._lane.peer.progress.advance()
        return self.done()

    def _look_around(self) -> bool:
        """Do the same, and check that all ranks live, as over shared memory no operation fails."""
        self._lane.peer.status.check(self._describe)
        return self._look()

    def _describe(self) -> str:
        return f"rank {self._lane.peer.world_rank}: {self._lane.name} ({self._what})"

    def _awaited(self) -> list[int]:
        """Return the ranks of the lane that this operation waits for, or may wait for."""
        others = [rank for rank in range(self._lane.size) if rank != self._lane.rank]
        return others if self._other is None or self._other == self._lane.rank else [self._other]

    def _describe_stall(self, outcome: str) -> str:
        peer = self._lane.peer
        ranks = [peer.world_ranks[rank] for rank in self._awaited()]
        site = WaitSite(self._lane.name, self._what, ranks, together=self._other is None)
        return peer.status.describe_stall(site, outcome)
