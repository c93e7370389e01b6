"""Exchanges over shared memory: the ranks share the work, and write each other's results.

A rank marks an exchange as ready when it has ended the one before on the lane: from then on others may read its input
and write its result. When the ranks whose memory it touches are ready, it does its part of the work and marks that. It
has ended when the ranks that touch its own memory have marked theirs. No other phase is needed, and no buffer.

It waits for no other ranks: in mixing, ranks of different components may be rounds apart. A rank's numbers only grow,
so a rank that is further has passed the awaited mark too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hocket.errors import TransportError
from hocket.transport.host.marks import READY, WORKED, Marks
from hocket.transport.host.peer import ProcessLane
from hocket.transport.pending import PendingCall
from hocket.transport.waiting import CHECK_EVERY_S, LONG_WAIT_S

# Between looks at what another thread of this process is about, in seconds.
_OTHER_THREAD_S = 0.0002


class HostLane:
    """The exchanges of one lane, one after the other, matched between ranks by their number.

    Args:
        lane: the lane.
        marks: every rank's.

    Attributes:
        rank: this rank in the lane.
        world_ranks: the lane's ranks in the job.
    """

    def __init__(self, lane: ProcessLane, marks: Marks) -> None:
        self.lane, self.rank, self.marks = lane, lane.rank, marks
        self.world_ranks = list(lane.peer.world_ranks)
        self.queue: deque[HostOperation] = deque()
        #: A progress thread carries exchanges on, and so does whoever waits for anything: one of them at a time.
        self.lock = threading.Lock()
        self._started = 0

    def start(
        self,
        what: str,
        call: str,
        work: Callable[[], Iterable[int]],
        *,
        touched: Sequence[int],
        touching: Sequence[int],
    ) -> HostOperation:
        """Begin an exchange, which runs after those before it.

        Args:
            what: the operation, for messages.
            call: facts that must agree between the ranks that touch each other's memory.
            work: this rank's part; returns the ranks in whose data it found NaN or Inf, if it looked.
            touched: the ranks whose memory `work` reads or writes.
            touching: the ranks whose work reads or writes this rank's memory.
        """
        self._started += 1
        exchange = HostOperation(self, self._started, what, call, work, touched, touching)
        self.queue.append(exchange)
        self.lane.peer.progress.add(exchange.advance)
        return exchange


class HostOperation(PendingCall[tuple[int, ...]]):
    """An exchange; every `advance` takes it as far as possible. See `HostLane.start`."""

    _yields = True

    def __init__(
        self,
        host: HostLane,
        number: int,
        what: str,
        call: str,
        work: Callable[[], Iterable[int]],
        touched: Sequence[int],
        touching: Sequence[int],
    ) -> None:
        super().__init__(host.lane, what)
        self._host = host
        self._number = number
        self._call = call
        self._work: Callable[[], Iterable[int]] | None = work
        self._touched, self._touching = touched, touching
        self._ready = self._done = False
        # The rank and the mark that the last `advance` of the lane's first exchange stopped at.
        self._behind: tuple[int, int] | None = None
        self._error: TransportError | None = None
        self._nonfinite: tuple[int, ...] = ()

    def done(self) -> bool:
        finished = self.advance()
        if self._error is not None:
            raise self._error
        return finished

    @property
    def result(self) -> tuple[int, ...]:
        """Return the ranks whose data held NaN or Inf, as found by the ranks that worked on this one's."""
        return self._nonfinite

    def advance(self) -> bool:
        """Do this rank's part as far as the others allow; return whether the exchange has ended.

        Returns at once if another thread of this process advances it.
        """
        if self._done:
            return True
        lock = self._host.lock
        if not lock.acquire(blocking=False):
            return False
        try:
            return self._advance()
        finally:
            lock.release()

    def _advance(self) -> bool:
        if self._done:
            return True
        queue, marks = self._host.queue, self._host.marks
        if not self._ready:
            while queue[0] is not self:
                if not queue[0]._advance():
                    return False
            self._ready = True
            marks.set_call(self._call)
            marks.set(READY, self._number)
        if self._work is not None:
            if self._waits(READY, self._touched):
                return False
            if others := marks.others_than(self._call, self._touched):
                self._error = self._disagreement(others)
                return self._end()
            marks.set_nonfinite(self._number, self._work())
            self._work = None
            marks.set(WORKED, self._number)
        if self._waits(WORKED, self._touching):
            return False
        self._nonfinite = marks.nonfinite(self._number, self._touching)
        return self._end()

    def _look_around(self) -> bool:
        self._lane.peer.progress.move_messages()
        return super()._look_around()

    def _may_be_brief(self) -> bool:
        return self._lane.last_wait_s < LONG_WAIT_S

    def _sleep(self, longest_s: float) -> None:
        """Sleep until the lane's first exchange can go on, at most for `longest_s` seconds.

        Another rank's mark wakes it. Other operations under way here may need it sooner, and do not wake it.
        """
        if self._lane.peer.progress.is_only(self.advance):
            longest_s = CHECK_EVERY_S
        behind, host = None, self._host
        if host.lock.acquire(blocking=False):
            try:
                if host.queue:
                    behind, number = host.queue[0]._behind, host.queue[0]._number
            finally:
                host.lock.release()
        if behind is None:  # another thread is at it
            time.sleep(min(longest_s, _OTHER_THREAD_S))
        else:
            which, rank = behind
            host.marks.sleep(which, number, rank, longest_s)

    def _awaited(self) -> list[int]:
        return sorted({*self._touched, *self._touching} - {self._host.rank})

    def _waits(self, which: int, ranks: Iterable[int]) -> bool:
        """Return whether one of `ranks` has not reached the mark, and note which."""
        behind = self._host.marks.behind(which, self._number, ranks)
        self._behind = None if behind is None else (which, behind)
        return behind is not None

    def _end(self) -> bool:
        self._done = True
        self._host.queue.popleft()
        return True

    def _disagreement(self, others: Sequence[int]) -> TransportError:
        ranks = ", ".join(str(self._host.world_ranks[rank]) for rank in others)
        return TransportError(
            f"rank {self._lane.peer.world_rank}: {self._lane.name}, exchange {self._number} over shared memory: "
            f"this rank called {self._call}, but ranks {ranks} called something else. Give every rank the same call, "
            "with buffers that were allocated together"
        )
