"""One exchange of a strategy while it is attached: its channel, its segments and its counters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from hocket.checkpoint.tree import flatten
from hocket.collective.api import Channel, Outcome
from hocket.compressor.api import footprint_of
from hocket.errors import CheckpointError
from hocket.progress import ProgressEngine
from hocket.segment.partition import unusual_strides
from hocket.segment.segment import Segment
from hocket.session.exchange.send_window import SendWindow
from hocket.strategy.exchange import GRADIENTS, Exchange, ProgressMode
from hocket.trace import Observer
from hocket.trace.observer import ObservedRequest, OverlapClock
from hocket.trace.profiler import profiled
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer
from hocket.transport.request import Finished, Request
from hocket.transport.threads import wait_until

__all__ = ["Counters", "ActiveExchange"]

# Bytes do not depend on it.
_NETWORK = NetworkModel()


@dataclass
class Counters:
    """The communication costs of a session so far.

    Attributes:
        bytes_sent: by this rank, as the collectives' algorithms count them.
        exchanges: number of segments exchanged.
        overlap: the time that exchanges were under way, and the part of it that nothing hid.
        outcomes: number of ended exchanges of gradients, or by collectives that answer from a progress thread.
        active: the sum over them of the number of ranks whose contributions arrived.
        staleness_max: the largest `Outcome.staleness`.
        partners: number of averagings of pairs, by the partner's rank in the world.
    """

    bytes_sent: float = 0.0
    exchanges: int = 0
    overlap: OverlapClock = field(default_factory=OverlapClock)
    outcomes: int = 0
    active: int = 0
    staleness_max: int = 0
    partners: Counter[int] = field(default_factory=Counter)

    @property
    def exposed_wait_s(self) -> float:
        """Return the seconds in which the training thread waited for an exchange."""
        return self.overlap.exposed_wait_s

    @property
    def under_way_s(self) -> float:
        """Return the seconds in which at least one exchange was under way."""
        return self.overlap.under_way_s


@dataclass
class ActiveExchange:
    """An exchange over this rank's scope.

    Attributes:
        exchange: the strategy's exchange.
        ranks: the world's ranks of this scope, by their number in it.
        peer: this rank's endpoint among them.
        segments: the segments that this rank exchanges: all of the model's, or those that it leads.
        scale: the factor of a contribution that makes the combination a mean.
        observer: is notified of it; None for no observer.
        ordered: whether all ranks have to begin segments in the same order, whichever is ready first.
        rounds: number of times that each segment has been exchanged, by its index.
    """

    exchange: Exchange
    ranks: Sequence[int]
    peer: Peer
    segments: Sequence[Segment]
    channel: Channel
    progress: ProgressEngine
    counters: Counters
    scale: float
    observer: Observer | None = None
    ordered: bool = False
    rounds: dict[int, int] = field(default_factory=dict)
    _requests: dict[int, Request] = field(default_factory=dict)
    _expected: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds = {segment.index: 0 for segment in self.segments}
        for segment in self.segments:
            segment.wait_by(partial(self._wait_for_device, segment.name))

    def _wait_for_device(self, name: str, over: Callable[[], bool]) -> None:
        """Wait for a device's work that depends on other ranks, and check meanwhile that they live."""
        if over():
            return
        peer = self.peer
        peer.status.note_waiting("on the device", name)
        wait_until(peer, over, lambda: f"other ranks in {name} (on the device)")
        peer.status.note_computing()

    @property
    def round(self) -> int:
        """Return the number of rounds of all segments; with staggering, of each of them."""
        return min(self.rounds.values(), default=0)

    def started(self, segment: Segment) -> bool:
        """Return whether this round's exchange of `segment` is under way, or waits for its turn."""
        return segment.index in self._requests or segment in self._turns

    def start(self, segment: Segment) -> None:
        """Send `segment.outgoing` in this round; it must not be written from now on."""
        self._start([segment], segment.name)

    def start_in_window(self, segment: Segment) -> None:
        """Send `segment.outgoing` after those before it have made room, at the latest when waited for.

        Segments that are exchanged together begin with the last of them: called for all, in their order.
        """
        group = self._group_of[segment.index]
        if len(group) == 1 or self.exchange.progress is ProgressMode.THREAD:
            self._turns.add(segment)  # a progress thread ends the first one while the others are under way
        elif segment is group[-1]:
            self._start_together(group)

    def under_way(self, segment: Segment) -> bool:
        """Return whether this round's exchange of `segment` has been started and is not done; never blocks."""
        return segment.index in self._requests and not self.arrived(segment)

    def start_all(self, indices: Collection[int]) -> None:
        """Send segments' `outgoing`, in groups where that costs less; for callers that wait for all."""
        for group in self._together:
            due = [segment for segment in group if segment.index in indices]
            if len(due) == len(group) > 1:
                self._start_together(group)
            else:
                for segment in due:
                    self.start(segment)

    @cached_property
    def _turns(self) -> SendWindow:
        return SendWindow(self)

    @cached_property
    def _together(self) -> Sequence[Sequence[Segment]]:
        return self.channel.groups

    @cached_property
    def _group_of(self) -> dict[int, Sequence[Segment]]:
        return {segment.index: group for group in self._together for segment in group}

    def _start_together(self, group: Sequence[Segment]) -> None:
        self._start(group, f"{self.exchange.name}[{len(group)} segments]")

    def _start(self, group: Sequence[Segment], name: str) -> None:
        copies = [copy for segment in group if (copy := segment.begin_stage_out()) is not None]
        with profiled("start", name):
            request = self._observed(
                lambda: self._begin(group, name, copies),
                name,
                self.rounds[group[0].index],
                sum(map(self._expected_bytes, group)),
            )
        self.progress.watch(request)
        packing = self.channel.packing
        for segment in group:
            self._requests[segment.index] = request
            if packing is None:
                self.counters.bytes_sent += self._expected_bytes(segment)
            else:
                self.counters.bytes_sent += self._bytes(packing.packed_bytes[segment.index], segment)
        self.counters.exchanges += len(group)

    def _observed(
        self, start: Callable[[], Request], name: str, round: int, num_bytes: float
    ) -> ObservedRequest:
        return ObservedRequest(
            start, self.peer.clock.now, self.counters.overlap, self.observer, name, round, num_bytes
        )

    def wait_for(self, start: Callable[[], Request], what: str, num_bytes: int) -> Any:
        """Carry out an exchange beside the segments at once, observed as theirs; return its result.

        Args:
            start: starts the exchange.
            what: its name, behind the exchange's.
            num_bytes: of this rank's contribution.
        """
        name = f"{self.exchange.name} {what}"
        with profiled("wait for", name):
            return self._observed(start, name, self.round, num_bytes).wait()

    def _expected_bytes(self, segment: Segment) -> float:
        """Return the bytes that this rank sends in a round; an estimate before a message is packed."""
        if segment.index not in self._expected:
            self._expected[segment.index] = self._bytes(
                footprint_of(self.exchange.compressor, segment).message_bytes, segment
            )
        return self._expected[segment.index]

    def _bytes(self, message_bytes: float, segment: Segment) -> float:
        exchange = self.exchange
        collective = self.channel.carried_by.get(segment.index, exchange.collective)
        return collective.cost(message_bytes, self.peer.size, exchange.topology, _NETWORK).bytes

    def _begin(self, group: Sequence[Segment], name: str, copies: Sequence[Request]) -> Request:
        """Start a group's exchange, once its data has come from the device by `copies`."""
        round = self.rounds[group[0].index]
        threaded = self.exchange.progress is ProgressMode.THREAD
        if copies and self.channel.packing is None and not threaded:
            return Request.all_of(copies).then(lambda _: self.channel.start(group, round))
        for copy in copies:  # compressors read and write on the device, and wait for it all the same
            copy.wait()
        request = self.channel.start(group, round)
        return self.progress.carry(request, self.peer, name) if threaded else request

    def arrived(self, segment: Segment) -> bool:
        """Return whether this round's exchange of `segment` has been started and is done; never blocks."""
        request = self._requests.get(segment.index)
        return request is not None and request.done()

    def wait(self, segment: Segment) -> Outcome:
        """Wait until this round's exchange of `segment` is done.

        Raises:
            ExchangeTimeoutError: some rank did not answer in time.
        """
        self._turns.begin(segment)
        with profiled("wait for", segment.name):
            outcome: Outcome = self._requests[segment.index].wait()
        return outcome

    def finish(self, segment: Segment) -> Outcome:
        """Wait until `segment.incoming` holds this round's combination; end the round."""
        outcome = self.wait(segment)
        self.progress.unwatch(self._requests.pop(segment.index))
        self.rounds[segment.index] += 1
        if self.exchange.slot == GRADIENTS or self.exchange.collective.traits.needs_thread:
            self.counters.outcomes += 1
            self.counters.active += outcome.num_active
            self.counters.staleness_max = max(self.counters.staleness_max, outcome.staleness)
            self.count_partners(outcome.partners)
        self._stage_in(segment)
        return outcome

    def receive(self, segment: Segment) -> Outcome:
        """Wait until `segment.incoming` holds this round's combination, without ending the round."""
        outcome = self.wait(segment)
        self._stage_in(segment)
        return outcome

    def put_back(self, segment: Segment, outcome: Outcome) -> None:
        """Reopen a finished round, whose combination `segment.incoming` holds again, as received."""
        self._requests[segment.index] = Finished(outcome)
        self.rounds[segment.index] -= 1

    def count_partners(self, partners: Iterable[int]) -> None:
        """Count averagings with ranks of the scope."""
        self.counters.partners.update(self.ranks[partner] for partner in partners)

    def _stage_in(self, segment: Segment) -> None:
        if self.channel.packing is None:
            segment.stage_in()
        else:
            segment.stage_trailer_in()

    def count_on(self, rounds: Mapping[str, int]) -> None:
        """Continue from other ranks' rounds, without the channel's state; no exchange is under way.

        Args:
            rounds: by the segments' indices, of another rank's segments.
        """
        least = min(rounds.values(), default=0)
        self.rounds = {index: rounds.get(str(index), least) for index in self.rounds}
        self.channel.resume(self.rounds, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run: rounds, the channel's state, received but unmerged results.

        Waits for exchanges under way without ending their rounds: a run continues the same whether it is saved or not.
        """
        pending = {}
        for segment in self.segments:
            if self.started(segment):
                outcome = self.receive(segment)
                pending[segment.index] = {
                    "outcome": dataclasses.astuple(outcome),
                    "outgoing": segment.outgoing[: segment.numel],
                    "incoming": segment.incoming[: segment.numel],
                    "companions": segment.incoming_trailer,
                }
        rounds = {str(index): round for index, round in self.rounds.items()}
        return {
            "rounds": rounds,
            "channel": self.channel.state_dict(),
            "pending": pending,
            "strides": self._strides(),
        }

    def _strides(self) -> dict[str, list[int]]:
        """Return the strides of parameters in segments, where their order is not that of the axes."""
        spans = [span for segment in self.segments for span in segment.spans]
        found = {span.name: unusual_strides(span.shape, span.stride) for span in spans}
        return {name: strides for name, strides in found.items() if strides is not None}

    def _check_strides(self, state: dict[str, Any]) -> None:
        """Refuse a state whose elements lie in another order than these parameters'."""
        now, then = self._strides(), state["strides"]
        differing = [name for name in {**now, **then} if now.get(name) != then.get(name)]
        if differing and (state["pending"] or flatten(state["channel"])[1]):
            raise CheckpointError(
                f"{self.exchange.name}: parameter {differing[0]} lies in memory in another order than when this was "
                f"saved (channels_last?): strides {now.get(differing[0], 'of its axes in order')}, and "
                f"{then.get(differing[0], 'of its axes in order')} then. What the exchange keeps is in that order: "
                "give the model the memory format that it had, before attach"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state_dict` on this rank; no exchange is under way.

        Raises:
            CheckpointError: the saved parameters' elements lay in another order, and that matters.
        """
        self._check_strides(state)
        self.rounds = {segment.index: state["rounds"][str(segment.index)] for segment in self.segments}
        # What is pending has been started.
        begun = {index: round + (index in state["pending"]) for index, round in self.rounds.items()}
        self.channel.resume(begun, state["channel"])
        for segment in self.segments:
            if segment.index not in state["pending"]:
                continue
            saved = state["pending"][segment.index]
            segment.restore(saved["outgoing"], saved["incoming"], saved["companions"])
            self._requests[segment.index] = Finished(Outcome(*saved["outcome"]))

    @property
    def idle(self) -> bool:
        """Tell whether no segment of this exchange is under way."""
        return not self._requests and not self._turns
