"""The matching of collectives: the k-th calls of every rank on one lane belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import TransportError
from hocket.transport.request import RANKS_DIVERGED
from hocket.transport.virtual.request import Station, VirtualRequest


@dataclass(frozen=True)
class Call:
    """The part of one rank in a collective.

    Attributes:
        what: the operation with all facts that must agree among the ranks, in a readable form.
        contribution: this rank's data.
        nbytes: bytes of it that cross the network; the largest rank's count.
        seconds: (nbytes, size) -> the collective's virtual time after the last rank has called, on idle links; what
            its bytes take, more than none would, the links are in use.
        conclude: takes the contributions by rank, when that time has passed, and returns the results by rank.
        purpose: the purpose of the call, for reports.
    """

    what: str
    contribution: Any
    nbytes: int
    seconds: Callable[[int, int], float]
    conclude: Callable[[list[Any]], Sequence[Any]]
    purpose: str = ""


@dataclass
class _CallsOfRound:
    calls: dict[int, Call] = field(default_factory=dict)
    requests: dict[int, VirtualRequest] = field(default_factory=dict)


class VirtualRendezvous:
    """The collectives of one lane, or of a peer itself.

    Args:
        where: names it in messages.
        ranks: its ranks, numbered as in the world.
        uses_links: whether its bytes wait for links and keep them busy; a few control bytes need not.
    """

    def __init__(self, where: str, ranks: tuple[int, ...], *, uses_links: bool) -> None:
        self._where = where
        self._ranks = ranks
        self._uses_links = uses_links
        self._num_calls = [0] * len(ranks)
        self._meetings: dict[int, _CallsOfRound] = {}

    def join(self, station: Station, rank: int, timeout_s: float, call: Call) -> VirtualRequest:
        """Take part, as the group's `rank`, in this rank's next collective here.

        The request fails on every rank if the ranks' calls do not agree.
        """
        station.scheduler.running(station.rank)
        number = self._num_calls[rank]
        self._num_calls[rank] += 1
        meeting = self._meetings.setdefault(number, _CallsOfRound())

        def describe() -> str:
            missing = [self._ranks[other] for other in range(len(self._ranks)) if other not in meeting.calls]
            return f"{name_ranks(missing) if missing else 'the network'} in {call.purpose or call.what}, {self._where}"

        meeting.calls[rank] = call
        request = meeting.requests[rank] = VirtualRequest(station, timeout_s, describe)
        if len(meeting.calls) == len(self._ranks):
            del self._meetings[number]
            self._hold(meeting, station)
        return request

    def _hold(self, meeting: _CallsOfRound, station: Station) -> None:
        """Finish the collective that `station`'s rank has completed."""
        calls = [meeting.calls[rank] for rank in range(len(self._ranks))]
        if len({call.what for call in calls}) > 1:
            self._fail(meeting, self._describe_disagreement(calls))
            return

        def conclude() -> None:
            try:
                results = calls[0].conclude([call.contribution for call in calls])
            except TransportError as error:
                self._fail(meeting, str(error))
                return
            for rank, result in enumerate(results):
                meeting.requests[rank].finish(result)

        seconds = calls[0].seconds(max(call.nbytes for call in calls), len(calls))
        if self._uses_links:
            latency_s = calls[0].seconds(0, len(calls))
            station.fabric.carry_together(self._ranks, seconds - latency_s, latency_s, conclude)
        else:
            timeline = station.scheduler.timeline
            timeline.call_at(timeline.now_s + seconds, conclude)

    def _fail(self, meeting: _CallsOfRound, message: str) -> None:
        for request in meeting.requests.values():
            request.fail(message)

    def _describe_disagreement(self, calls: list[Call]) -> str:
        callers: dict[str, list[int]] = {}
        for rank, call in zip(self._ranks, calls, strict=True):
            callers.setdefault(call.what, []).append(rank)
        parts = [f"{name_ranks(ranks)} called {what}" for what, ranks in callers.items()]
        return f"the ranks disagree in a collective, {self._where}: {'; '.join(parts)}: {RANKS_DIVERGED}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 1, 2 and 5`."""
    *most, last = ranks
    return f"ranks {', '.join(map(str, most))} and {last}" if most else f"rank {last}"
