"""A partial sum in shared memory: the rank that starts a round adds up what all have proposed.

Each rank adds its gradients to a buffer that the others can read, under a lock of its own. A rank that comes to a
round, and by the rules starts it, takes all locks, adds up what is there into the round's slot, marks it as taken,
and says that the round has ended. So nothing goes in twice or is lost, however many come at once; a result has one
author, and the same bits for all; and rounds end in order. Ranks that compute are not woken and need no progress
thread, and those that wait sleep until the round has ended.

There is a slot for each rank, taken in turn. A reader checks afterwards whether its slot was written meanwhile; if so,
it reads a newer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from hocket.api import Array, Outcome, Peer, TreeSum, sync, wait_until
from hocket.errors import PeerLostError
from hocket_eager.host.layout import RankPart, Table, TableLayout
from hocket_eager.partial_sum import PartialSum
from hocket_eager.rules import Delivery, QuorumRules, is_handed

# Seconds until the launcher's side can say which rank has died; the rank's lock shows it earlier.
_TOLD_WITHIN_S = 2.0


def open_shared_sum(
    peer: Peer, name: str, numel: int, dtype: np.dtype[np.generic], rules: QuorumRules, missed: Delivery
) -> SharedSum | None:
    """Open the rounds of a segment; None, on all ranks alike, where the ranks share no memory. Collective.

    Args:
        peer: the ranks.
        name: the segment, for messages.
        numel, dtype: a gradient's.
        rules: the rules by which rounds start.
        missed: the result that a late rank is handed.
    """
    if peer.size == 1 or not sync.is_available():
        return None
    sums = missed is Delivery.SUM
    memory = TableLayout.allocate(peer, numel, dtype, sums)
    if memory is None:
        return None
    layout = TableLayout(peer.rank, memory, numel, dtype, sums)
    peer.allgather_bytes(b"")  # everybody has initialised its part
    return SharedSum(peer, name, layout, rules, missed)


class SharedSum(PartialSum):
    """A partial sum in shared memory, used by the training thread alone; see `PartialSum`.

    Args:
        peer: the ranks, which are on one host.
        name: the segment, for messages.
        layout: their memory.
        rules: the rules by which rounds start.
        missed: the result that a late rank is handed.
    """

    def __init__(
        self, peer: Peer, name: str, layout: TableLayout, rules: QuorumRules, missed: Delivery
    ) -> None:
        self.name = name
        self._peer = peer
        self._rank, self._size = peer.rank, peer.size
        self._table, self._parts, self._own = layout.table, layout.parts, layout.own
        self._rules = rules
        self._missed = missed
        self._totals: dict[int, TreeSum] = {}
        self._holding_table = _Holding(self, self._table)
        self._holding_parts = [_Holding(self, part) for part in self._parts]
        self._holding_own = self._holding_parts[self._rank]

    # -------------------------------------------------------------------------------------------- what it does

    def propose(self, data: Array, step: int) -> None:
        own = self._own
        with self._holding_own:
            if own.oldest[0] < 0:
                np.copyto(own.send, data)
                own.newest[0] = step
                own.oldest[0] = step
            else:
                np.add(own.send, data, out=own.send)
                own.newest[0] = step
        with self._holding_table:
            self._table.arrived[self._rank] = step + 1
            self._start_if_it_may()

    def ended(self, step: int) -> bool:
        self._telling(self._peer.status.check_lost)
        return self._table.rounds[0] > step

    def wait(self, step: int, timeout_s: float | None = None) -> None:
        if self.ended(step):
            return
        peer = self._peer
        peer.status.note_waiting(f"round {step}", self.name)
        self._wait_for_round(step, timeout_s)
        peer.status.note_computing()

    def fetch(self, step: int, out: Array) -> Outcome:
        if self._missed is Delivery.SUM:
            round, active = self._fetch_sum(out)
        else:
            round, active = self._fetch_newest(out)
        own = self._own
        included = own.accepted_step[0] == step and is_handed(own.accepted_round[0], round, self._missed)
        return Outcome(round, included, active, staleness=own.staleness_max[0])

    def left(self) -> tuple[int | None, Array]:
        own = self._own
        with self._holding_own:
            if own.oldest[0] < 0:
                return None, np.zeros_like(own.send)
            return own.oldest[0], own.send.copy()

    def restore(self, oldest: int | None, data: Array) -> None:
        own = self._own
        with self._holding_own:
            np.copyto(own.send, data)
            own.oldest[0] = -1 if oldest is None else oldest

    def resume(self, round: int) -> None:
        with self._holding_table:
            self.first_round = round
            self._table.rounds[0] = max(self._table.rounds[0], round)
            self._table.arrived[self._rank] = round
        with self._holding_own:
            self._own.fetched[0] = max(self._own.fetched[0], round)

    def leave(self) -> None:
        """Leave for good: no rank waits for this rank's application from now on."""
        with self._holding_table:
            self._table.gone[0] += 1
            self._start_if_it_may()

    def close(self) -> None:
        self.leave()

    # ------------------------------------------------------------------------------------------- how it does it

    def _start_if_it_may(self) -> None:
        """Carry out the next round if it may start; the table is held."""
        table = self._table
        round = table.rounds[0]
        if self._rules.may_start(round, table.arrived) or (
            table.gone[0] and bool(np.any(table.arrived > round))
        ):
            self._carry_out(round)
            table.rounds[0] = round + 1
            table.word[0] = (table.word[0] + 1) % 2**32
            sync.wake(table.changed)

    def _carry_out(self, round: int) -> None:
        author = self._parts[round % self._size]
        with ExitStack() as held:
            for holding in self._holding_parts:
                held.enter_context(holding)
            if self._missed is Delivery.SUM and author.slot_round[0] >= 0:
                self._save_for_late_ranks(author)
            given = [part for part in self._parts if part.oldest[0] >= 0]
            author.slot_round[0] = round
            author.slot_active[0] = sum(part.newest[0] == round for part in given)
            if given:
                self._sum_of(len(given), author.slot.dtype)([part.send for part in given], author.slot)
            else:
                author.slot[...] = 0
            for part in given:
                part.accepted_step[0] = part.newest[0]
                part.accepted_round[0] = round
                part.staleness_max[0] = max(part.staleness_max[0], round - part.oldest[0])
                part.oldest[0] = -1

    def _save_for_late_ranks(self, author: RankPart) -> None:
        """Keep a slot's result, which will be overwritten, for the ranks that have not been handed it."""
        round = author.slot_round[0]
        for part in self._parts:
            if part.fetched[0] == round:
                if part.has_undelivered[0]:
                    np.add(part.undelivered, author.slot, out=part.undelivered)
                else:
                    np.copyto(part.undelivered, author.slot)
                part.has_undelivered[0] = 1
                part.fetched[0] = round + 1

    def _sum_of(self, count: int, dtype: np.dtype[np.generic]) -> TreeSum:
        if count not in self._totals:
            self._totals[count] = TreeSum(count, dtype)
        return self._totals[count]

    def _fetch_newest(self, out: Array) -> tuple[int, int]:
        while True:
            round = self._table.rounds[0] - 1
            author = self._parts[round % self._size]
            np.copyto(out, author.slot)
            active = author.slot_active[0]
            # The slot's next round begins when all rounds before it have ended.
            if self._table.rounds[0] < round + self._size:
                return round, active

    def _fetch_sum(self, out: Array) -> tuple[int, int]:
        own = self._own
        with self._holding_own:
            # No round can be carried out meanwhile, as that takes this lock.
            newest = self._table.rounds[0] - 1
            empty = not own.has_undelivered[0]
            if own.has_undelivered[0]:
                np.copyto(out, own.undelivered)
                own.has_undelivered[0] = 0
            for round in range(own.fetched[0], newest + 1):
                slot = self._parts[round % self._size].slot
                if empty:
                    np.copyto(out, slot)
                    empty = False
                else:
                    np.add(out, slot, out=out)
            if empty:
                out[...] = 0  # all rounds have been handed out
            own.fetched[0] = newest + 1
            return newest, self._parts[newest % self._size].slot_active[0]

    # ------------------------------------------------------------------------------------------------- waiting

    def acquire(self, what: RankPart | Table) -> None:
        """Take a lock.

        Raises:
            PeerLostError: a rank has died that held it, or another one.
            ExchangeTimeoutError: a rank holds it for too long.
        """
        try:
            if not what.mutex.acquire(0.0):
                self._telling(lambda: self._wait_for_lock(what))
        except sync.OwnerDiedError:
            raise self._lost(what.holder[0]) from None
        what.holder[0] = self._rank

    def release(self, what: RankPart | Table) -> None:
        """Give a lock back."""
        what.holder[0] = -1
        what.mutex.release()

    def _wait_for_lock(self, what: RankPart | Table) -> None:
        taken = False

        def sleep(waited_s: float, longest_s: float) -> None:
            nonlocal taken
            taken = what.mutex.acquire(longest_s)

        wait_until(
            self._peer,
            lambda: taken,
            lambda: f"{self.name}, which rank {what.holder[0]} holds in shared memory",
            sleep=sleep,
        )

    def _wait_for_round(self, step: int, timeout_s: float | None) -> None:
        table = self._table
        seen = table.word[0]

        def ended() -> bool:
            nonlocal seen
            seen = table.word[0]
            return self.ended(step)

        def sleep(waited_s: float, longest_s: float) -> None:
            sync.wait_while(table.changed, seen, longest_s)

        wait_until(self._peer, ended, lambda: self._describe(step), timeout_s, sleep)

    def _describe(self, step: int) -> str:
        """Describe the ranks that a round waits for."""
        round = self._table.rounds[0]
        missing = self._rules.missing(round, self._table.arrived)
        return f"round {step} of {self.name}, which needs {missing} first"

    def _telling(self, call: Callable[[], None]) -> None:
        """Call `call`; errors of a dead rank say which round was under way."""
        try:
            call()
        except PeerLostError as error:
            raise type(error)(f"{self.name}, round {self._table.rounds[0]}: {error}") from error

    def _lost(self, holder: int) -> PeerLostError:
        """Return the error for a lock whose holder has died."""
        end_s = time.monotonic() + _TOLD_WITHIN_S
        while time.monotonic() < end_s:
            self._telling(self._peer.status.check_lost)  # knows the rank's number in the job
            time.sleep(0.05)
        round = self._table.rounds[0]
        return PeerLostError(
            f"{self.name}, round {round}: rank {holder} has died while it worked in shared memory"
        )


class _Holding:
    """A lock held in a `with` statement.

    It is made once, as a rank that comes to a round finds nothing in its caches.
    """

    __slots__ = ("_of", "_what")

    def __init__(self, of: SharedSum, what: RankPart | Table) -> None:
        self._of = of
        self._what = what

    def __enter__(self) -> None:
        self._of.acquire(self._what)

    def __exit__(self, *error: object) -> None:
        self._of.release(self._what)
