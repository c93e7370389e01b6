"""One exchange of a strategy while it is attached: its channel, its segments and its counters."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NoReturn

from torch.autograd.profiler import record_function

from hocket.collective.api import Channel, Outcome
from hocket.compressor.api import footprint_of
from hocket.errors import UserError
from hocket.progress import ProgressEngine
from hocket.segment.segment import Segment
from hocket.session.torch_internals import is_profiled
from hocket.strategy.exchange import GRADIENTS, Exchange, ProgressMode
from hocket.trace import ExchangeEvent, Observer
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer
from hocket.transport.request import Finished, Request
from hocket.transport.threads import wait_until

# Bytes do not depend on it.
_NETWORK = NetworkModel()
_NOTHING: AbstractContextManager[object] = nullcontext()
# A look costs 2 to 3 us. With an exchange for each of 161 layers, looking at all of them at each layer would take 30 ms
# of a step; and any look has MPI go on with everything.
_LOOKS_AT_A_TIME = 8


@dataclass
class Counters:
    """The communication costs of a session so far.

    An exchange is under way from its start until the training thread finds that it is over: in a wait, or when a
    gradient arrives. Time in which several are under way counts once.

    Attributes:
        bytes_sent: by this rank, as the collectives' algorithms count them.
        exchanges: number of segments exchanged.
        under_way_s: seconds in which at least one exchange was under way, up to the last moment when none was.
        exposed_wait_s: the part of these seconds in which the training thread waited.
        outcomes: number of ended exchanges of gradients, or by collectives that answer from a progress thread.
        active: the sum over them of the number of ranks whose contributions arrived.
        staleness_max: the largest `Outcome.staleness`.
        partners: number of averagings of pairs, by the partner's rank in the world.
    """

    bytes_sent: float = 0.0
    exchanges: int = 0
    under_way_s: float = 0.0
    exposed_wait_s: float = 0.0
    outcomes: int = 0
    active: int = 0
    staleness_max: int = 0
    partners: Counter[int] = field(default_factory=Counter)
    _num_under_way: int = field(default=0, repr=False)
    _since_s: float = field(default=0.0, repr=False)

    def note_start(self, now_s: float) -> None:
        """Count an exchange as under way, from a time in seconds."""
        if self._num_under_way == 0:
            self._since_s = now_s
        self._num_under_way += 1

    def note_end(self, now_s: float) -> None:
        """Count one exchange less as under way, from a time in seconds."""
        self._num_under_way -= 1
        if self._num_under_way == 0:
            self.under_way_s += now_s - self._since_s


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
    # The requests of exchanges that nobody has found over, the next to be looked at first; their events are None where
    # there is no observer.
    _under_way: OrderedDict[Request, ExchangeEvent | None] = field(default_factory=OrderedDict)
    _expected: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds = {segment.index: 0 for segment in self.segments}
        for segment in self.segments:
            segment.wait_by(partial(self._wait_for_device, segment.name))
        self.progress.watch(self.look)

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
        """Return whether this round's exchange of `segment` is under way."""
        return segment.index in self._requests

    def start(self, segment: Segment) -> None:
        """Send `segment.outgoing` in this round; it must not be written from now on."""
        self._start([segment], segment.name)

    def start_in_order(self, segment: Segment) -> None:
        """Send `segment.outgoing` in this round: called for all segments, in their order.

        Segments that are exchanged together begin with the last of them.
        """
        group = self._group_of[segment.index]
        if len(group) == 1 or self.exchange.progress is ProgressMode.THREAD:
            self.start(segment)  # a progress thread ends the first one while the others are under way
        elif segment is group[-1]:
            self._start_together(group)

    def start_all(self, indices: Collection[int]) -> None:
        """Send segments' `outgoing`, in groups where that costs less; for callers that wait for all."""
        for group in self.channel.groups:
            due = [segment for segment in group if segment.index in indices]
            if len(due) == len(group) > 1:
                self._start_together(group)
            else:
                for segment in due:
                    self.start(segment)

    @cached_property
    def _group_of(self) -> dict[int, Sequence[Segment]]:
        return {segment.index: group for group in self.channel.groups for segment in group}

    def _start_together(self, group: Sequence[Segment]) -> None:
        self._start(group, f"{self.exchange.name}[{len(group)} segments]")

    def _start(self, group: Sequence[Segment], name: str) -> None:
        with _profiled("start", name):
            request = self._note_start(
                lambda: self._begin(group, name),
                name,
                self.rounds[group[0].index],
                sum(map(self._expected_bytes, group)),
            )
        packing = self.channel.packing
        for segment in group:
            self._requests[segment.index] = request
            self.counters.bytes_sent += (
                self._expected_bytes(segment)
                if packing is None
                else self._bytes(packing.packed_bytes[segment.index], segment)
            )
        self.counters.exchanges += len(group)

    def _note_start(self, start: Callable[[], Request], name: str, round: int, num_bytes: float) -> Request:
        """Note that an exchange starts, and return the request of `start`, for `_is_over` or `_wait`.

        Notes cost about a microsecond for each exchange; events are made only for an observer.
        """
        event, start_s = None, self.peer.clock.now()
        self.counters.note_start(start_s)
        if self.observer is not None:
            event = ExchangeEvent(name, round, num_bytes, start_s)
            self.observer.started(event)
        try:
            request = start()
        except Exception as error:
            self._note_end(event, error)
            raise
        self._under_way[request] = event
        return request

    def look(self) -> None:
        """Look at a few exchanges under way, in turns; never blocks.

        Raises:
            TransportError: one of them failed.
        """
        if not self._under_way:  # as between most gradients of small parameters
            return
        for request in list(islice(self._under_way, _LOOKS_AT_A_TIME)):
            if not self._is_over(request):
                self._under_way.move_to_end(request)

    def _is_over(self, request: Request) -> bool:
        """Return whether an exchange is over, and note its end; never blocks."""
        if request not in self._under_way:
            return True
        try:
            over = request.done()
        except Exception as error:
            self._end(request, error)
            raise
        if over:
            self._end(request)
        return over

    def _wait(self, request: Request) -> Any:
        """Wait for an exchange, note the wait and the end, and return its result."""
        if request not in self._under_way:
            return request.wait()
        event, start_s = self._under_way[request], self.peer.clock.now()
        failure: BaseException | None = None
        try:
            return request.wait()
        except BaseException as error:
            failure = error
            raise
        finally:
            end_s = self.peer.clock.now()
            self.counters.exposed_wait_s += end_s - start_s
            if self.observer is not None and event is not None:
                self.observer.waited(event, start_s, end_s)
            self._end(request, failure)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        if request in self._under_way:  # an operation that a wait advanced may have found this over, too
            self._note_end(self._under_way.pop(request), error)

    def _note_end(self, event: ExchangeEvent | None, error: BaseException | None) -> None:
        end_s = self.peer.clock.now()
        self.counters.note_end(end_s)
        if self.observer is not None and event is not None:
            event = replace(event, end_s=end_s)
            self.observer.complete(event) if error is None else self.observer.failed(event, error)

    def wait_for(self, start: Callable[[], Request], what: str, num_bytes: int) -> Any:
        """Carry out an exchange beside the segments at once, observed as theirs; return its result.

        Args:
            start: starts the exchange.
            what: its name, behind the exchange's.
            num_bytes: of this rank's contribution.
        """
        name = f"{self.exchange.name} {what}"
        with _profiled("wait for", name):
            return self._wait(self._note_start(start, name, self.round, num_bytes))

    def _expected_bytes(self, segment: Segment) -> float:
        """Return the bytes that this rank sends in a round; an estimate before a message is packed."""
        if segment.index not in self._expected:
            self._expected[segment.index] = self._bytes(
                footprint_of(self.exchange.compressor, segment).message_bytes, segment
            )
        return self._expected[segment.index]

    def _bytes(self, message_bytes: float, segment: Segment) -> float:
        collective = self.channel.carried_by.get(segment.index, self.exchange.collective)
        return collective.cost(message_bytes, self.peer.size, self.exchange.topology, _NETWORK).bytes

    def _begin(self, group: Sequence[Segment], name: str) -> Request:
        """Start a group's exchange, once its data has come from the device."""
        round = self.rounds[group[0].index]
        copies = [copy for segment in group if (copy := segment.begin_stage_out()) is not None]
        threaded = self.exchange.progress is ProgressMode.THREAD
        if copies and self.channel.packing is None and not threaded:
            return Request.all_of(copies).then(lambda _: self.channel.start(group, round))
        for copy in copies:  # compressors read and write on the device, and wait for it all the same
            copy.wait()
        request = self.channel.start(group, round)
        if not isinstance(request, Request):
            self._refuse_result(
                "returned", request, "a request", "return what the lane or its `then` returns"
            )
        return self.progress.carry(request, self.peer, name) if threaded else request

    def arrived(self, segment: Segment) -> bool:
        """Return whether this round's exchange of `segment` has been started and is done; never blocks."""
        request = self._requests.get(segment.index)
        return request is not None and self._is_over(request)

    def wait(self, segment: Segment) -> Outcome:
        """Wait until this round's exchange of `segment` is done.

        Raises:
            ExchangeTimeoutError: some rank did not answer in time.
            UserError: the collective is wrong, as no outcome has come.
        """
        with _profiled("wait for", segment.name):
            outcome = self._wait(self._requests[segment.index])
        if not isinstance(outcome, Outcome):
            how = "return Outcome(round, included=True, num_active=size) from the function given to `then`"
            self._refuse_result("gave a request that ended with", outcome, "an Outcome", how)
        return outcome

    def _refuse_result(self, verb: str, result: object, due: str, how: str) -> NoReturn:
        """Refuse what a collective gives in place of a request or an outcome: a mistake of its author."""
        channel, collective = type(self.channel), type(self.exchange.collective)
        raise UserError(
            f"{self.exchange.name}: {channel.__qualname__}.start of collective {collective.__qualname__} "
            f"({channel.__module__}) {verb} {result!r} instead of {due}: {how}"
        )

    def finish(self, segment: Segment) -> Outcome:
        """Wait until `segment.incoming` holds this round's combination; end the round."""
        outcome = self.wait(segment)
        del self._requests[segment.index]
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

    @property
    def idle(self) -> bool:
        """Tell whether no segment of this exchange is under way."""
        return not self._requests


def _profiled(what: str, name: str) -> AbstractContextManager[object]:
    """Return a context that is a range of torch's profiler, `hocket: what name`; 0.1 us if no profiler runs."""
    # A range that nobody records would take 5 us.
    if not is_profiled():
        return _NOTHING
    return record_function(f"hocket: {what} {name}")
