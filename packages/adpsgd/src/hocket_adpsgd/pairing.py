"""Averagings of two ranks at a time, which a progress thread carries out while its training thread computes.

A rank wants to average with another; the lower-numbered of the two leads. It takes those who want it in turn, and asks
the other, who agrees as soon as it has no other averaging under way. Then both send what they hold, and each moves by
half of the difference: the two changes cancel to the bit, so that the ranks' mean is kept. While a rank has asked it
answers no other, and a rank waits only for higher ranks. So no ranks wait for each other in a circle, on any graph,
and two that want each other at once have one averaging.

Source: X. Lian, W. Zhang, C. Zhang, J. Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML
2018, algorithm 1, whose ranks avoid circles by a bipartite graph: one part asks, the other answers. To lead by number
is ours.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hocket.api import Activity, Array, Bells, Lane, Peer, ProgressEngine, Request
from hocket.errors import PeerLostError, TransportError

# Under which number notices and values travel on the lane; each in order between two ranks.
_NOTICES, _VALUES = 0, 1


class SharedCopy:
    """The values that a rank averages with others: those last entered by its training thread, with later changes.

    The training thread enters, fetches and takes; the progress thread begins and ends averagings, one at a time.

    Args:
        numel: number of values.
        dtype: float32 or float64.

    Attributes:
        open: whether values have been entered, so that others can average with them.
        wishes: number of times that values have been entered.
        partner: the rank that the newest wish is for; None for none.
        sent: this rank's values at the start of the averaging under way, [numel].
        received: the partner's values, [numel].
    """

    def __init__(self, numel: int, dtype: np.dtype[np.generic]) -> None:
        self.open = False
        self.wishes = 0
        self.partner: int | None = None
        self.sent, self.received = np.zeros(numel, dtype), np.zeros(numel, dtype)
        self._values = np.zeros(numel, dtype)
        #: What averagings have added that no fetch has handed out.
        self._changes = np.zeros(numel, dtype)
        self._partners: list[int] = []
        self._lock = threading.Lock()

    def enter(self, values: Array, partner: int | None) -> int:
        """Hold `values` [numel], with the changes not yet fetched; return the number of this wish, from 1."""
        with self._lock:
            np.add(values, self._changes, out=self._values)
            self.partner, self.open = partner, True
            self.wishes += 1
            return self.wishes

    def begin(self, partner: int) -> int:
        """Copy the values into `sent`; return the newest wish's number if it is for `partner`, else 0."""
        with self._lock:
            np.copyto(self.sent, self._values)
            return self.wishes if self.partner == partner else 0

    def end(self, partner: int) -> None:
        """Move by half of the difference between `received` and `sent`, which is left in `received`."""
        change = np.subtract(self.received, self.sent, out=self.received)
        change *= 0.5
        with self._lock:
            np.add(self._values, change, out=self._values)
            np.add(self._changes, change, out=self._changes)
            self._partners.append(partner)

    def fetch(self, out: Array) -> tuple[int, ...]:
        """Copy the values into `out` [numel]; return the partners since the last fetch, in order."""
        with self._lock:
            np.copyto(out, self._values)
            self._changes[...] = 0
            partners, self._partners = tuple(self._partners), []
            return partners

    def take_partners(self) -> tuple[int, ...]:
        """Return the partners since the last call, or fetch, in order."""
        with self._lock:
            partners, self._partners = tuple(self._partners), []
            return partners

    def changes(self) -> Array:
        """Return a copy of the changes not yet fetched, [numel]."""
        with self._lock:
            return self._changes.copy()

    def reset(self, changes: Array | float = 0.0) -> None:
        """Hold `changes` [numel] for the values that are entered next, until when others wait."""
        with self._lock:
            self._changes[...] = changes
            self.open = False


class _Notice(IntEnum):
    """A notice from one rank to another, sent with a number."""

    #: Lead an averaging with me; the number of my wish.
    WANT = 0
    #: Average with me.
    ASK = 1
    #: Yes, and with it ends my wish of that number; 0 for none.
    AGREE = 2


class _Turn(NamedTuple):
    """An averaging that this rank has to begin; `wish` is the wish that it leads, None to answer."""

    partner: int
    wish: int | None
    is_own: bool


class PairAverager(Activity):
    """The averagings of one segment on one rank; opened and closed by all ranks together.

    Args:
        peer: this rank's endpoint.
        progress: the engine that advances it.
        name: stands in messages, for instance `parameters.0[3]`.
        copy: the values to average.
    """

    def __init__(self, peer: Peer, progress: ProgressEngine, name: str, copy: SharedCopy) -> None:
        self._progress, self._name, self._copy = progress, name, copy
        self._rank, self._size = peer.rank, peer.size
        #: How many wishes have been looked at, and how many have ended.
        self._noted = self._granted = 0
        self._turns: deque[_Turn] = deque()
        #: By rank, the newest of its wishes that has ended here.
        self._settled: dict[int, int] = {}
        self._asked: int | None = None
        #: The averaging under way: with whom, the wish that ends with it, and its messages.
        self._partner: int | None = None
        self._grants = 0
        self._messages: list[Request] = []
        self._heard: deque[tuple[int, _Notice, int]] = deque()
        self._awaited: dict[int, tuple[Array, Request]] = {}  # notices that arrive on the lane
        self._ringing: list[tuple[int, int, int]] = []
        self._sending: list[Request] = []
        #: Barriers with the other ranks that the application wants, and that it has passed.
        self._barriers_wanted = self._barriers_passed = 0
        self._barrier: Request | None = None
        self._closing = self._closed = False
        self._lane: Lane
        self._connection: Bells | None = None
        progress.open(self, peer, name)

    # ------------------------------------------------------------------------------------ from the training thread

    def enter(self, values: Array, partner: int | None) -> int:
        """Enter `values` [numel] into the copy, to be averaged with `partner` once; never blocks.

        Returns:
            The number of this wish, for `ended` and `wait`.
        """
        self._progress.check()
        number = self._copy.enter(values, partner)
        self._progress.nudge()
        return number

    def ended(self, number: int) -> bool:
        """Return whether a wish has ended.

        Raises:
            TransportError: it never will.
        """
        self._progress.check()
        return self._granted >= number

    def wait(self, number: int, timeout_s: float | None = None) -> None:
        """Block until a wish has ended, without burning a core.

        Raises:
            ExchangeTimeoutError: not in time; names the rank that is waited for.
            TransportError: it never will; PeerLostError if a rank has died.
        """
        what = f"averaging {number - 1}"
        self._progress.wait_until(
            lambda: self._granted >= number, what, self._name, lambda: self._describe(what), timeout_s
        )

    def wait_for_all(self) -> None:
        """Block until no rank has an averaging under way; collective, after all wishes have ended.

        No averaging begins again before a rank enters values.

        Raises:
            ExchangeTimeoutError: a rank does not call this in time.
            TransportError: it never will.
        """
        self._barriers_wanted += 1
        wanted = self._barriers_wanted
        self._progress.nudge()
        what = "the end of what is under way"
        self._progress.wait_until(
            lambda: self._barriers_passed >= wanted, what, self._name, lambda: self._describe(what), None
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closing = True
        self.wait_for_all()
        self._progress.forget(self)
        self._lane.close()

    def _describe(self, what: str) -> str:
        partner = self._copy.partner
        if self._partner is not None:
            lacks = f"lack the values of rank {self._partner}"
        elif self._asked is not None:
            lacks = f"wait for rank {self._asked} to agree"
        elif self._granted < self._copy.wishes:
            lacks = f"wait for rank {partner} to ask"
        else:
            lacks = "wait for other ranks to end their averagings"
        return f"{what} of {self._name}: the averagings of this rank {lacks}"

    # ------------------------------------------------------------------------------------- from the engine's thread

    def begin(self, lane: Lane, connection: Bells) -> None:
        self._lane = lane
        for rank in range(self._size):
            if rank != self._rank and not connection.hears(rank):
                self._await_notice(rank)
        self.unheard = bool(self._awaited)
        self._connection = connection

    def note_rung(self, message: int, round: int) -> None:
        source, kind = divmod(message, len(_Notice))
        self._heard.append((source, _Notice(kind), round))

    @property
    def in_flight(self) -> bool:
        return bool(self._messages or self._ringing or self._sending or self._barrier)

    def advance(self, everywhere: bool) -> bool:
        if self._closed or self._connection is None:
            return False
        try:
            moved = False
            while not self._closed and self._advance(everywhere):
                moved = True
            return moved
        except PeerLostError:
            raise
        except Exception as error:
            raise TransportError(
                f"rank {self._rank}: averaging with rank {self._partner} failed in {self._name}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _advance(self, everywhere: bool) -> bool:
        """Take one step, and return whether another may be possible."""
        if everywhere:
            self._look_for_notices()
        self._look_for_sent()
        return (
            self._hear() or self._note_wish() or self._end() or self._take_turn() or self._advance_barrier()
        )

    def _look_for_notices(self) -> None:
        for source, (buffer, request) in list(self._awaited.items()):
            if request.done():
                self._heard.append((source, _Notice(buffer[0]), int(buffer[1])))
                self._await_notice(source)

    def _await_notice(self, source: int) -> None:
        buffer = np.zeros(2, np.int64)
        self._awaited[source] = buffer, self._lane.irecv(buffer, source, _NOTICES)

    def _look_for_sent(self) -> None:
        assert self._connection is not None
        connection, ringing = self._connection, self._ringing
        while ringing and connection.ring(*ringing[0]):
            del ringing[0]
        self._sending = [request for request in self._sending if not request.done()]

    def _tell(self, to: int, notice: _Notice, number: int) -> None:
        assert self._connection is not None
        if self._connection.reaches(to):
            self._ringing.append((to, self._rank * len(_Notice) + notice, number))
            self._look_for_sent()
        else:
            message = np.array([notice, number], np.int64)
            self._sending.append(self._lane.isend(message, to, _NOTICES))

    def _hear(self) -> bool:
        """Handle a notice, if there is one."""
        if not self._heard:
            return False
        source, notice, number = self._heard.popleft()
        match notice:
            case _Notice.WANT:
                self._turns.append(_Turn(source, number, is_own=False))
            case _Notice.ASK:
                self._turns.append(_Turn(source, None, is_own=False))
            case _Notice.AGREE:
                self._asked = None
                self._settled[source] = max(number, self._settled.get(source, 0))
                self._exchange(source, self._copy.begin(source))
        return True

    def _note_wish(self) -> bool:
        """Start the application's newest wish, if it is not started."""
        number, partner = self._copy.wishes, self._copy.partner
        if self._noted == number:
            return False
        self._noted = number
        if partner is None:
            self._granted = number
        elif self._rank < partner:
            self._turns.append(_Turn(partner, number, is_own=True))
        else:
            self._tell(partner, _Notice.WANT, number)
        return True

    @property
    def _is_busy(self) -> bool:
        return self._partner is not None or self._asked is not None

    def _take_turn(self) -> bool:
        """Begin the averaging that has waited longest, if this rank is free."""
        if self._is_busy or not self._turns or not self._copy.open:
            return False
        partner, wish, is_own = self._turns.popleft()
        if wish is None:
            grants = self._copy.begin(partner)
            self._tell(partner, _Notice.AGREE, grants)
            self._exchange(partner, grants)
        elif wish > (self._granted if is_own else self._settled.get(partner, 0)):
            self._asked = partner
            self._tell(partner, _Notice.ASK, 0)
        return True

    def _exchange(self, partner: int, grants: int) -> None:
        self._partner, self._grants = partner, grants
        self._messages = [
            self._lane.irecv(self._copy.received, partner, _VALUES),
            self._lane.isend(self._copy.sent, partner, _VALUES),
        ]

    def _end(self) -> bool:
        """End the averaging under way, if its messages are received and sent."""
        if self._partner is None:
            return False
        self._messages = [message for message in self._messages if not message.done()]
        if self._messages:
            return False
        self._copy.end(self._partner)
        self._partner = None
        self._granted = max(self._granted, self._grants)
        return True

    def _advance_barrier(self) -> bool:
        """Enter the wanted barrier when this rank has nothing open, and note when all ranks have."""
        if self._barriers_passed == self._barriers_wanted or self._is_busy or self._ringing or self._sending:
            return False
        if self._barrier is None and self._granted == self._copy.wishes:
            self._barrier = self._lane.ibarrier()
        if self._barrier is None or not self._barrier.done():
            return False
        self._barrier = None
        if self._closing:
            for _, request in self._awaited.values():
                request.withdraw()
            self._closed = True
        self._barriers_passed += 1
        return True
