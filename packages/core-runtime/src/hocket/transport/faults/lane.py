"""A lane whose operations are delayed, overtaken or lost, or at which their rank dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hocket.arrays import Array, Buffer
from hocket.transport.faults.request import FaultyRequest
from hocket.transport.faults.victim import Key, Victim
from hocket.transport.gathering import check_gathering
from hocket.transport.lane import Lane, Mixer
from hocket.transport.peer import Peer
from hocket.transport.request import Finished, Request, T
from hocket.transport.wrapper import WrapperLane

# A message that is to be overtaken waits so long at most, in seconds.
_OVERTAKEN_WITHIN_S = 1e-3

# What stays in order: messages of one rank and round, and the collectives, which are to nobody.
_COLLECTIVES: Key = (-1, -1)


class FaultyLane(WrapperLane):
    """A lane with faults.

    Args:
        held: the lane without faults.
        peer: the peer of the lane.
        victim: this rank.
        ranks: the lane's, as ranks of the world.
    """

    def __init__(self, held: Lane, peer: Peer, victim: Victim, ranks: Sequence[int]) -> None:
        super().__init__(held)
        self._peer = peer
        self._victim = victim
        self._ranks = ranks
        self._num_begun: Counter[Key] = Counter()
        # On a device all of a rank's lanes keep one order, as its ranks match them by that.
        self._held_back = victim.held_back if peer.ordered else []

    def isend(self, data: Array, to: int, round: int) -> Request:
        self._victim.use()
        receiver = self._ranks[to] if 0 <= to < self.size else to
        return self._begin(
            "send",
            receiver,
            (to, round),
            f"send to rank {receiver}",
            lambda: self.held.isend(data, to, round),
        )

    def irecv(self, data: Array, source: int, round: int) -> Request:
        self._victim.use()
        self._victim.clock.look()
        request = self._request(lambda: self.held.irecv(data, source, round), "receive")
        request.begin_now()
        return request

    def iexchange(
        self, sends: Sequence[tuple[Buffer, int]], receives: Sequence[tuple[Buffer, int]], round: int
    ) -> Request:
        if not self._peer.ordered:
            return Lane.iexchange(self, sends, receives, round)  # message by message
        return self._collective("exchange", lambda: self.held.iexchange(sends, receives, round))

    def iallreduce(self, send: Array, receive: Array) -> Request:
        return self._collective("allreduce", lambda: self.held.iallreduce(send, receive))

    def mixer(self, places: Sequence[tuple[Array, Array]]) -> Mixer | None:
        return None  # messages, on which the faults are

    def ireduce(self, send: Array, receive: Array | None, root: int) -> Request:
        return self._collective("reduce", lambda: self.held.ireduce(send, receive, root))

    def iallgather(self, send: Array, receive: Array) -> Request[list[Array]]:
        check_gathering(f"rank {self._ranks[self.rank]}: {self.name}", send, receive, self.size)
        return self._collective("allgather", lambda: self.held.iallgather(send, receive))

    def ibroadcast(self, data: Array, root: int) -> Request:
        return self._collective("broadcast", lambda: self.held.ibroadcast(data, root))

    def ibarrier(self) -> Request:
        return self._collective("barrier", self.held.ibarrier)

    def _collective(self, kind: str, start: Callable[[], Request[T]]) -> Request[T]:
        self._victim.use()
        return self._begin(kind, -1, _COLLECTIVES, kind, start)

    def _begin(self, kind: str, to: int, key: Key, what: str, start: Callable[[], Request[T]]) -> Request[T]:
        number = self._num_begun[key]
        self._num_begun[key] += 1
        victim, collective = self._victim, key is _COLLECTIVES
        round, nth = (number, 0) if collective else (key[1], number)
        fate = victim.faults.fate(kind, self.name, self._ranks[self.rank], to, round, nth)
        if fate.dropped:
            return Finished[Any](None)  # lost, and its sender believes it sent
        victim.clock.look()
        self._held_back[:] = [(other, held) for other, held in self._held_back if not held.has_begun]
        before = next((held for other, held in reversed(self._held_back) if other == key), None)
        request = self._request(start, f"{what}, round {round}", before)
        if fate.delay_s == 0 and not fate.overtaken:
            request.begin_now()
            if not collective and request.has_begun:
                victim.overtake()
        else:
            victim.clock.hold(request, fate.delay_s or _OVERTAKEN_WITHIN_S)
            if fate.overtaken:
                victim.await_overtaking(request)
        if not request.has_begun:
            self._held_back.append((key, request))
        return request

    def _request(
        self, start: Callable[[], Request], what: str, before: FaultyRequest | None = None
    ) -> FaultyRequest:
        place = f"{what} in {self.name}, held back by a fault"
        return FaultyRequest(self._victim.clock, start, place, self._peer.timeout_s, before)
