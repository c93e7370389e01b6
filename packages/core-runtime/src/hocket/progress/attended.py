"""An execution as its driver attends to it: what the application wants of it, and how it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hocket.arrays import Array
from hocket.errors import PeerLostError, TransportError
from hocket.schedule.schedule import Schedule
from hocket.transport.lane import Lane
from hocket.transport.request import Request
from hocket.transport.signals import Connection, Ring

if TYPE_CHECKING:
    from hocket.progress.execution import Execution

__all__ = ["Attended"]


class Attended:
    """What runs of one schedule need of the thread that drives them.

    Closing: the ranks tell each other how many rounds they have triggered. Each goes on until it has ended the most
    that anybody has; then nothing can be on its way any more, and what is posted ahead is withdrawn.

    Attributes:
        name: the exchange, for messages.
        lane: of its own.
        closing: whether the application has triggered all that it will.
        closed: whether nothing is posted and nothing will be.
        rings: what has rung for it since the last `advance`.
    """

    def __init__(self, schedule: Schedule, lane: Lane, name: str) -> None:
        self.name = name
        self.lane = lane
        self.closing = False
        self.closed = False
        self.rings: list[Ring] = []
        self._schedule = schedule
        self._execution: Execution | None = None
        self._agreement: Request | None = None
        self._triggered = np.zeros(lane.size, np.int64)
        self._final: int | None = None

    # -------------------------------------------------------------------------------- from any thread of the rank

    def open(self, connection: Connection) -> Array:
        """Begin: from now on `advance` posts and sends; return the program, for a bell to serve."""
        from hocket.progress.execution import Execution  # which imports Numba

        self._execution = Execution(self._schedule, self.lane, connection)
        return self._execution.program

    @property
    def ended(self) -> int:
        """How many rounds have ended."""
        return 0 if self._execution is None else self._execution.round

    def trigger(self, round: int) -> None:
        """Have `round`, and those before, begin if they have not."""
        assert self._execution is not None
        self._execution.wanted = max(self._execution.wanted, round + 1)

    def tell(self, watched: bool) -> None:
        """Have the bell return to Python when a round ends, or no more; it does while this is closing."""
        if self._execution is not None:
            self._execution.tell(watched or self.closing)

    def close(self) -> None:
        """Say that all is triggered that the application will trigger."""
        self.closing = True
        self.tell(True)

    def describe(self) -> str:
        """Say what this rank's part of the present round lacks."""
        if self._execution is None:
            return "not open yet"
        awaited = self._execution.awaited()
        if not awaited:
            return f"round {self.ended} has not begun here"
        whom = ", ".join(f"rank {source} ({operation!r})" for source, operation in awaited)
        return f"round {self.ended} lacks a message of {whom}"

    # ---------------------------------------------------------------------------------- from the driving thread

    @property
    def in_flight(self) -> bool:
        """Whether something is known to be under way that no bell will tell the end of."""
        if self._execution is None or self.closed:
            return False
        return self._execution.in_flight or (self._agreement is not None and self._final is None)

    @property
    def unheard(self) -> bool:
        """Whether messages of some ranks must be looked for, as they cannot ring."""
        return self._execution is not None and not self.closed and self._execution.unheard

    def advance(self, everywhere: bool) -> bool:
        """Do what can be done now; never blocks.

        Args:
            everywhere: look for messages for which nobody has rung, too.

        Returns:
            Whether anything has happened.

        Raises:
            PeerLostError: a rank has died.
            TransportError: a message or a computation failed; names rank, exchange, round and operation.
        """
        execution = self._execution
        if execution is None or self.closed:
            return False
        rings, self.rings = self.rings, []
        try:
            moved = execution.advance(rings, everywhere)
            return (self.closing and self._close(execution)) or moved
        except PeerLostError:
            raise
        except Exception as error:
            raise TransportError(
                f"rank {self.lane.rank}: {self.name}, round {execution.round}, operation {execution.doing!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _close(self, execution: Execution) -> bool:
        """Go on with closing, and return whether that is done."""
        if self._agreement is None:
            own = np.zeros_like(self._triggered)
            own[self.lane.rank] = execution.wanted
            self._agreement = self.lane.iallreduce(own, self._triggered)
        if self._final is None and self._agreement.done():
            self._final = int(self._triggered.max())
        if self._final is not None and execution.round >= self._final:
            execution.withdraw()
            self.closed = True
        return self.closed
