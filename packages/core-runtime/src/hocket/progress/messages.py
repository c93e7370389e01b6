"""The messages of one execution: small ones come with a ring where a bell is in earshot, the others on its lane."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hocket.arrays import Array
from hocket.progress.notices import Notices
from hocket.schedule.operation import Receive
from hocket.schedule.schedule import Schedule
from hocket.transport.lane import Lane
from hocket.transport.request import Request
from hocket.transport.signals import Connection

__all__ = ["Messages", "Place"]

#: Source and tag: what tells the messages to a rank apart within a round.
Place = tuple[int, int]

# Data of a round is sent under one of so many numbers, which every transport accepts. They come again only rounds
# later, and then still in order between the same two ranks.
_NUMBERS = 16_384


class Messages:
    """What a schedule sends and receives outside of its program, over all rounds.

    Attributes:
        unheard: whether there are ranks whose messages do not ring, so that they must be looked for.
    """

    def __init__(self, schedule: Schedule, lane: Lane, connection: Connection) -> None:
        """Make ready for notices."""
        self._lane = lane
        self._connection = connection
        self._num_tags = schedule.num_tags
        receives = [operation for operation in schedule.operations if isinstance(operation, Receive)]
        self.unheard = any(not connection.hears(receive.source) for receive in receives)
        self._notices = {
            (receive.source, receive.tag): Notices(lane, receive.source, receive.tag)
            for receive in receives
            if receive.data is None and not connection.hears(receive.source)
        }
        self._receiving: dict[Place, Request] = {}
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
        """Return from where data is awaited on the lane."""
        return [*self._receiving]

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

    def receive(self, place: Place, round: int, data: Array) -> None:
        """Receive into `data`, on the lane."""
        source, tag = place
        self._receiving[place] = self._lane.irecv(data, source, self._number(tag, round))

    def note_rung(self, place: Place) -> None:
        """Note that a message has been rung for that comes on the lane."""
        self._unanswered[place] += 1

    def keep(self, place: Place, round: int, message: bytes) -> None:
        """Keep what came with a ring until its round."""
        self._early[place, round] = message

    def kept(self, place: Place, round: int) -> bytes | None:
        """Give back what was kept for `round`, if anything was."""
        return self._early.pop((place, round), None)

    def look(self, everywhere: bool) -> list[tuple[Place, int | None]]:
        """Return what has come on the lane: data, or a notice and its round; never blocks.

        Args:
            everywhere: look also where nobody has rung.
        """
        if not (self._notices or self._receiving):
            return []
        come: list[tuple[Place, int | None]] = []
        rung = [place for place, rung in self._unanswered.items() if rung > 0]
        for place in (*self._notices, *self._receiving) if everywhere else rung:
            if place in self._notices and self._notices[place].look():
                come.append((place, self._notices[place].newest))
            elif place in self._receiving and self._receiving[place].done():
                del self._receiving[place]
                come.append((place, None))
            else:
                continue
            self._unanswered[place] -= 1
        return come

    def withdraw(self) -> None:
        """Give up what is posted for rounds that will not come."""
        for request in self._receiving.values():
            request.withdraw()
        for notices in self._notices.values():
            notices.withdraw()

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
