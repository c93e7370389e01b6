"""Operations of ranks that are processes, how they are waited for, and those over memory that a host's ranks share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from hocket.arrays import Array, MixingRows
from hocket.transport.forks import check_no_fork
from hocket.transport.host.collectives import HostCollectives
from hocket.transport.host.exchange import HostExchange
from hocket.transport.host.mixing import HostMixer
from hocket.transport.host.peer import HostPeer
from hocket.transport.lane import Lane, Mixer
from hocket.transport.request import Request
from hocket.transport.status import WaitSite
from hocket.transport.waiting import CHECK_EVERY_S, LONG_WAIT_S, back_off_s, poll_briefly, wait

__all__ = ["HostRequest", "Operation", "ProcessLane"]


class ProcessLane(Lane):
    """A lane of ranks that are processes: what is large goes over their host's memory, the rest by messages.

    Args:
        peer: whose lane it is.
        name: stands in messages.
        host: for collectives over shared memory; None where messages are all there is.

    Attributes:
        last_wait_s: seconds that the last wait took that was not over soon.
    """

    def __init__(self, peer: HostPeer, name: str, host: HostCollectives | None = None) -> None:
        self.peer = peer
        self.name = name
        self.rank, self.size = peer.rank, peer.size
        self.last_wait_s = 0.0
        self._host = host

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        held = None if self._host is None else self._host.mixer(places)
        return None if held is None else _Mixer(self, held)

    def host_allreduce(self, send: Array, receive: Array) -> Request | None:
        """Begin an allreduce over shared memory; None, on all ranks alike, where messages are the way."""
        exchange = None if self._host is None else self._host.allreduce(send, receive)
        return None if exchange is None else HostRequest(self, exchange, "allreduce")

    def host_broadcast(self, data: Array, root: int) -> Request | None:
        """Begin a broadcast over shared memory; None, on all ranks alike, where messages are the way."""
        exchange = None if self._host is None else self._host.broadcast(data, root)
        what = f"broadcast from rank {self.peer.world_rank_of(root)}"
        return None if exchange is None else HostRequest(self, exchange, what)


class Operation(Request):
    """An operation on a lane, and how it is waited for.

    Args:
        lane: where it takes place.
        what: the operation, for messages.
        other: the rank at the other end of a message, or that broadcasts; None where all wait for all.
    """

    __slots__ = ("_lane", "_other", "_what")

    _yields: ClassVar[bool] = False

    def __init__(self, lane: ProcessLane, what: str, other: int | None = None) -> None:
        check_no_fork()
        self._lane = lane
        self._what = what
        self._other = other

    def wait(self, timeout_s: float | None = None) -> Any:
        check_no_fork()
        peer = self._lane.peer
        look = self._look if peer.progress.busy else self.done
        if look():
            return self.result
        expected_s = peer.waits.expected_s()
        if not expected_s and self._may_be_brief() and poll_briefly(look, self._yields):
            return self.result
        peer.status.note_waiting(self._what, self._lane.name)
        timeout_s = peer.timeout_s if timeout_s is None else timeout_s

        def sleep(waited_s: float, longest_s: float) -> None:
            self._sleep(min(back_off_s(waited_s, expected_s), longest_s))

        took_s = wait(self._look_around, timeout_s, self._describe_stall, sleep)
        peer.waits.ended(took_s)
        self._lane.last_wait_s = took_s
        peer.status.note_computing()
        return self.result

    def _may_be_brief(self) -> bool:
        """Return whether to look without a pause at first, which other ranks may have to pay with their core."""
        return True

    def _sleep(self, longest_s: float) -> None:
        """Sleep before another look, at most for `longest_s`."""
        time.sleep(longest_s)

    def _look(self) -> bool:
        """Advance everything that other ranks need of this one, and return whether this is done."""
        self._lane.peer.progress.advance()
        return self.done()

    def _look_around(self) -> bool:
        """Do the same, and look whether all ranks still live: over shared memory nothing fails."""
        self._lane.peer.status.failures.check(self._describe)
        return self._look()

    def _describe(self) -> str:
        return f"rank {self._lane.peer.world_rank}: {self._lane.name} ({self._what})"

    def _awaited(self) -> list[int]:
        """Return the ranks of the lane that this waits for, or may wait for."""
        others = [rank for rank in range(self._lane.size) if rank != self._lane.rank]
        return others if self._other is None or self._other == self._lane.rank else [self._other]

    def _describe_stall(self, outcome: str) -> str:
        peer = self._lane.peer
        ranks = [peer.world_rank_of(rank) for rank in self._awaited()]
        site = WaitSite(self._lane.name, self._what, ranks, together=self._other is None)
        return peer.status.describe_stall(site, outcome)


class HostRequest(Operation):
    """An exchange over memory that the host's ranks share."""

    __slots__ = ("_exchange",)

    _yields = True

    def __init__(self, lane: ProcessLane, exchange: HostExchange, what: str) -> None:
        super().__init__(lane, what)
        self._exchange = exchange
        lane.peer.progress.add(exchange)

    def done(self) -> bool:
        finished = self._exchange.advance()
        if self._exchange.error is not None:
            raise self._exchange.error
        return finished

    @property
    def result(self) -> tuple[int, ...]:
        return self._exchange.nonfinite

    def _look_around(self) -> bool:
        self._lane.peer.progress.move_messages()
        return super()._look_around()

    def _may_be_brief(self) -> bool:
        return self._lane.last_wait_s < LONG_WAIT_S

    def _sleep(self, longest_s: float) -> None:
        # Another rank's mark wakes it. What else is under way here may need it sooner, and wakes nobody.
        alone = self._lane.peer.progress.is_only(self._exchange)
        self._exchange.sleep(CHECK_EVERY_S if alone else longest_s)

    def _awaited(self) -> list[int]:
        return self._exchange.others


class _Mixer(Mixer):
    def __init__(self, lane: ProcessLane, held: HostMixer) -> None:
        self._lane = lane
        self._held = held

    def start(self, rows: Sequence[MixingRows]) -> Request:
        return HostRequest(self._lane, self._held.start(rows), "mixing")
