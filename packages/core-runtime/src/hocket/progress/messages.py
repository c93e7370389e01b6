"""The messages of one execution: small ones come with a ring where a bell is in earshot, the others on its lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from hocket.errors import TransportError
from hocket.progress.notices import Notices
from hocket.schedule.operation import Receive
from hocket.schedule.schedule import Schedule
from hocket.transport.peer import Array, Lane, Request
from hocket.transport.signals import Connection, Ring

__all__ = ["Messages", "Place"]

#: Source and tag: what tells the messages to a rank apart within a round.
Place = tuple[int, int]

# Data of a round is sent under one of so many numbers, which every transport accepts. They come again only rounds
# later, and then still in order between the same two ranks.
_NUMBERS = 16_384


class Messages:
    """What is sent and received for a schedule, over all rounds.

    Attributes:
        heard: the newest round that a notice has come for, by place; -1 before the first.
        unheard: whether there are ranks whose messages do not ring, so that they must be looked for.
    """

    def __init__(self, schedule: Schedule, lane: Lane, connection: Connection) -> None:
        """Make ready for notices."""
        self._lane = lane
        self._connection = connection
        self._num_tags = schedule.num_tags
        receives = [operation for operation in schedule.operations if isinstance(operation, Receive)]
        self.unheard = any(not connection.hears(receive.source) for receive in receives)
        self.heard: dict[Place, int] = {
            (receive.source, receive.tag): -1 for receive in receives if receive.data is None
        }
        self._notices = {
            place: Notices(lane, *place) for place in self.heard if not connection.hears(place[0])
        }
        self._receiving: dict[Place, Request] = {}
        self._expected: dict[Place, tuple[int, Array]] = {}  # to come with a ring: round, buffer
        self._early: dict[tuple[Place, int], bytes] = {}
        # Rings less messages on the lane; a message can be seen before its ring.
        self._unanswered: Counter[Place] = Counter()

    @property
    def in_flight(self) -> bool:
        """Whether messages have been rung for that are awaited and not found on the lane yet."""
        if not self._unanswered:
            return False
        return any(
            rung > 0 and (place in self._receiving or place in self._notices)
            for place, rung in self._unanswered.items()
        )

    def awaited(self) -> list[Place]:
        """Return where data is awaited."""
        return [*self._receiving, *self._expected]

    def send(self, to: int, tag: int, round: int, data: Array | None) -> Request | None:
        """Send data, or a notice where None; return None if that is done already."""
        connection = self._connection
        reached = connection.reaches(to)
        if reached and (data is None or data.nbytes <= connection.largest_bytes):
            message = b"" if data is None else data.tobytes()
            rung = connection.ring(to, tag, round, message)
            return None if rung else _Ringing(connection, (to, tag, round, message))
        if data is None:
            request = self._lane.isend(np.array([round]), to, tag)
        else:
            request = self._lane.isend(data, to, self._number(tag, round))
        if reached and not connection.ring(to, tag, round):
            return _Ringing(connection, (to, tag, round, None), request)
        return None if request.done() else request

    def post(self, place: Place, round: int, data: Array) -> bool:
        """Receive into `data`; return whether that is done already."""
        source, tag = place
        if self._connection.hears(source) and data.nbytes <= self._connection.largest_bytes:
            early = self._early.pop((place, round), None)
            if early is None:
                self._expected[place] = (round, data)
                return False
            _copy(early, data)
            return True
        self._receiving[place] = self._lane.irecv(data, source, self._number(tag, round))
        return False

    def collect(self, rings: Iterable[Ring], everywhere: bool) -> list[Place]:
        """Take in what has come and return where; never blocks.

        Args:
            rings: what has rung since the last call.
            everywhere: look also where nobody has rung.
        """
        come: list[Place] = []
        for ring in rings:
            place = (ring.source, ring.message)
            if ring.data is None:
                self._unanswered[place] += 1
            elif place in self.heard:
                self.heard[place] = max(self.heard[place], ring.round)
                come.append(place)
            elif self._expected.get(place, (-1,))[0] == ring.round:
                _copy(ring.data, self._expected.pop(place)[1])
                come.append(place)
            else:
                self._early[place, ring.round] = ring.data
        if self._notices or self._receiving:
            self._look_on_lane(everywhere, come)
        return come

    def _look_on_lane(self, everywhere: bool, come: list[Place]) -> None:
        rung = [place for place, rung in self._unanswered.items() if rung > 0]
        for place in (*self._notices, *self._receiving) if everywhere else rung:
            if self._look(place):
                self._unanswered[place] -= 1
                come.append(place)

    def withdraw(self) -> None:
        """Give up what is posted for rounds that will not come."""
        for request in self._receiving.values():
            request.withdraw()
        for notices in self._notices.values():
            notices.withdraw()

    def _look(self, place: Place) -> bool:
        """Return whether something has come on the lane."""
        if place in self._notices:
            notices = self._notices[place]
            if notices.look():
                self.heard[place] = max(self.heard[place], notices.newest)
                return True
        elif place in self._receiving and self._receiving[place].done():
            del self._receiving[place]
            return True
        return False

    def _number(self, tag: int, round: int) -> int:
        """Return under which number data is sent on the lane; notices have those from 0 to `num_tags`."""
        rounds = max(_NUMBERS // self._num_tags, 2)
        return self._num_tags * (1 + round % rounds) + tag


class _Ringing(Request):
    """A ring that is rung as soon as the other's bell has room for it, and the message that was sent before it."""

    def __init__(
        self,
        connection: Connection,
        ring: tuple[int, int, int, bytes | None],
        request: Request | None = None,
    ) -> None:
        self._connection = connection
        self._ring = ring
        self._rung = False
        self._request = request

    def done(self) -> bool:
        self._rung = self._rung or self._connection.ring(*self._ring)
        return self._rung and (self._request is None or self._request.done())

    def wait(self, timeout_s: float | None = None) -> None:
        raise NotImplementedError("only looked at")


def _copy(message: bytes, data: Array) -> None:
    if len(message) != data.nbytes:
        raise TransportError(f"a message of {len(message)} bytes came into a buffer of {data.nbytes}")
    if message:
        data.reshape(-1).view(np.uint8)[:] = np.frombuffer(message, dtype=np.uint8)
