"""Exchanges over shared memory: the ranks share the work, and write each other's results.

A rank makes an exchange ready when it has ended the one before on the lane: from then on others may read what it
gives and write what it gets. When those are ready whose memory it touches, it does its part of the work, marks that,
and has ended when those have marked it too that touch its own memory. No other phase is needed, and no buffer.

Nobody waits for ranks beyond these: in mixing, ranks of different components may be rounds apart. A rank's numbers only
grow, so that who is further has also done what is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hocket.errors import TransportError
from hocket.transport.host.marks import READY, WORKED, Marks

__all__ = ["HostExchange", "HostLane"]

# Between looks at what another thread of this process is about, in seconds.
_OTHER_THREAD_S = 0.0002


class HostLane:
    """The exchanges of one lane, one after the other, matched between ranks by their number.

    Args:
        name: the lane's, for messages.
        world_ranks: the lane's ranks in the job.
        rank: this rank among them.
        marks: every rank's.
    """

    def __init__(self, name: str, world_ranks: Sequence[int], rank: int, marks: Marks) -> None:
        self.name, self.world_ranks, self.rank, self.marks = name, world_ranks, rank, marks
        self.queue: deque[HostExchange] = deque()
        #: A progress thread carries exchanges on, and so does whoever waits for anything: one of them at a time.
        self.lock = threading.Lock()
        self._started = 0

    def start(
        self, call: str, work: Callable[[], Iterable[int]], *, touched: Sequence[int], touching: Sequence[int]
    ) -> HostExchange:
        """Queue an exchange.

        Args:
            call: all that must agree between the ranks that touch each other's memory.
            work: this rank's part; returns the ranks in whose data it found NaN or Inf, if it looked.
            touched: the ranks whose memory `work` reads or writes.
            touching: the ranks whose work reads or writes this rank's memory.
        """
        self._started += 1
        exchange = HostExchange(self, self._started, call, work, touched, touching)
        self.queue.append(exchange)
        return exchange


class HostExchange:
    """One exchange; every `advance` does what can be done. See `HostLane.start`."""

    def __init__(
        self,
        lane: HostLane,
        number: int,
        call: str,
        work: Callable[[], Iterable[int]],
        touched: Sequence[int],
        touching: Sequence[int],
    ) -> None:
        self._lane = lane
        self._number = number
        self._call = call
        self._work: Callable[[], Iterable[int]] | None = work
        self._touched, self._touching = touched, touching
        self._ready = self._done = False
        # Which rank has not come how far: what the last `advance` stopped at, of the lane's first exchange.
        self._awaited: tuple[int, int] | None = None
        #: What went wrong, to be raised by whoever asks for this exchange; it is done then.
        self.error: TransportError | None = None
        #: The ranks whose data held NaN or Inf, as far as the ranks looked that worked on this one's.
        self.nonfinite: tuple[int, ...] = ()

    @property
    def others(self) -> list[int]:
        """The ranks of the lane that it needs, but this one."""
        return sorted({*self._touched, *self._touching} - {self._lane.rank})

    def advance(self) -> bool:
        """Do this rank's part as far as the other ranks are; return whether the exchange is done, or has failed.

        Returns at once where another thread of this process is at it.
        """
        if self._done:
            return True
        lock = self._lane.lock
        if not lock.acquire(blocking=False):
            return False
        try:
            return self._advance()
        finally:
            lock.release()

    def _advance(self) -> bool:
        if self._done:
            return True
        lane, marks = self._lane, self._lane.marks
        if not self._ready:
            while lane.queue[0] is not self:
                if not lane.queue[0]._advance():
                    return False
            self._ready = True
            marks.set_call(self._call)
            marks.set(READY, self._number)
        if self._work is not None:
            if self._waits(READY, self._touched):
                return False
            if others := marks.others_than(self._call, self._touched):
                self.error = self._disagreement(others)
                return self._end()
            marks.set_nonfinite(self._number, self._work())
            self._work = None
            marks.set(WORKED, self._number)
        if self._waits(WORKED, self._touching):
            return False
        self.nonfinite = marks.nonfinite(self._number, self._touching)
        return self._end()

    def sleep(self, longest_s: float) -> None:
        """Sleep until the lane's first exchange can go on after `advance` has stopped, at most for `longest_s`."""
        awaited = None
        if self._lane.lock.acquire(blocking=False):
            try:
                if self._lane.queue:
                    first = self._lane.queue[0]
                    awaited, number = first._awaited, first._number
            finally:
                self._lane.lock.release()
        if awaited is None:  # another thread is at it
            time.sleep(min(longest_s, _OTHER_THREAD_S))
        else:
            which, rank = awaited
            self._lane.marks.sleep(which, number, rank, longest_s)

    def _waits(self, which: int, ranks: Iterable[int]) -> bool:
        """Return whether one of `ranks` has not come so far, and note which."""
        behind = self._lane.marks.behind(which, self._number, ranks)
        self._awaited = None if behind is None else (which, behind)
        return behind is not None

    def _end(self) -> bool:
        self._done = True
        self._lane.queue.popleft()
        return True

    def _disagreement(self, others: Sequence[int]) -> TransportError:
        lane = self._lane
        ranks = ", ".join(str(lane.world_ranks[rank]) for rank in others)
        return TransportError(
            f"rank {lane.world_ranks[lane.rank]}: {lane.name}, exchange {self._number} over shared memory: "
            f"this rank called {self._call}, ranks {ranks} something else: give every rank the same call, with "
            "buffers that were allocated together"
        )
