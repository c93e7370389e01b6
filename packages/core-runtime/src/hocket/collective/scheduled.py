"""A channel whose sums are schedules, which the progress engine carries out: an algorithm of Hocket's own choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.arrays import Array
from hocket.collective.api import Channel, Outcome
from hocket.collective.packing import Packing
from hocket.progress import ProgressEngine
from hocket.schedule import Compute, Execution, NoOp, Schedule, chain
from hocket.segment.segment import Segment
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["AllreduceBuilder", "ScheduledAllreduceChannel"]

#: (rank, size, data) -> this rank's part of summing everybody's `data` in place.
AllreduceBuilder = Callable[[int, int, Array], Schedule]


@dataclass
class _Sum:
    """One segment's schedule.

    Attributes:
        total: what the schedule sums in place.
        contribution: what it copies there first; set in each round.
        run: carries it out.
        num_started: rounds so far. A run counts its own, which begin at 0 where the exchange's are resumed.
    """

    total: Array
    contribution: Array
    run: Execution
    num_started: int = 0


class ScheduledAllreduceChannel(Channel):
    """Puts the sum of all ranks' `outgoing` into everyone's `incoming`.

    Args:
        peer: the ranks that take part; collective.
        segments: opened in this order on every rank, started later in any order.
        progress: carries the schedules out.
        build: the algorithm.
        packing: whose messages, of the segment's dtype, are summed in compressed form; None where segments are, as
            they are.
    """

    def __init__(
        self,
        peer: Peer,
        segments: Sequence[Segment],
        progress: ProgressEngine,
        build: AllreduceBuilder,
        packing: Packing | None = None,
    ) -> None:
        self.packing = packing
        self._peer = peer
        self._sums = {segment.index: self._open(segment, progress, build) for segment in segments}

    def _open(self, segment: Segment, progress: ProgressEngine, build: AllreduceBuilder) -> _Sum:
        total = segment.incoming_array
        if self.packing is not None:
            total = np.empty(self.packing.capacity_bytes(segment) // total.itemsize, total.dtype)

        def copy(round: int) -> None:
            np.copyto(total, opened.contribution)

        begin = Schedule((NoOp("go"), Compute("copy", ("go",), call=copy)), ("copy",), trigger="go")
        schedule = chain(("begin", begin), ("sum", build(self._peer.rank, self._peer.size, total)))
        opened = _Sum(total, total, Execution(schedule, self._peer, progress, segment.name))
        return opened

    def start(self, segment: Segment, round: int) -> Request:
        opened, packing = self._sums[segment.index], self.packing
        opened.contribution = segment.outgoing_array if packing is None else packing.pack(segment, round)
        request = opened.run.start(opened.num_started)
        opened.num_started += 1

        def finish(_: int) -> Outcome:
            if packing is not None:
                segment.incoming.zero_()
                packing.add(opened.total, 1.0, segment, round)
            return Outcome(round, included=True, num_active=self._peer.size)

        return request.then(finish)

    def flush(self) -> None:
        """Nothing outlives its request here."""

    def close(self) -> None:
        for opened in self._sums.values():
            opened.run.close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.packing is None else self.packing.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.packing is not None:
            self.packing.load_state_dict(state)
