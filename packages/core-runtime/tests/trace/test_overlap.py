"""The overlap share that an observer is told, exact, on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import hocket
from hocket.collective.api import Channel, Outcome
from hocket.errors import ExchangeTimeoutError, TransportError
from hocket.progress import InlineProgress, ProgressEngine
from hocket.segment.segment import Segment
from hocket.session.exchange.active import ActiveExchange, Counters
from hocket.trace import ExchangeEvent, Observer
from hocket.trace.record import Recorder
from hocket.trace.transport import TracedLane, TracedPeer, TracedRequest
from hocket.transport.network import NetworkModel
from hocket.transport.peer import Peer
from hocket.transport.request import Finished, Request
from hocket.transport.single import SinglePeer

STEPS, WIDTH, RANKS = 3, 64, 2
NETWORK = NetworkModel(latency_s=1e-4, bandwidth_bits_per_s=27.2e6)
EXCHANGE_S = NETWORK.allreduce_seconds(4 * (WIDTH * WIDTH + WIDTH), RANKS)


@dataclass
class Notes(Observer):
    """Keeps what it is told."""

    begun: list[ExchangeEvent] = field(default_factory=list)
    over: list[ExchangeEvent] = field(default_factory=list)
    failures: list[tuple[ExchangeEvent, str]] = field(default_factory=list)
    waits: list[tuple[str, float]] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    def started(self, exchange: ExchangeEvent) -> None:
        self.begun.append(exchange)

    def complete(self, exchange: ExchangeEvent) -> None:
        self.over.append(exchange)

    def failed(self, exchange: ExchangeEvent, error: BaseException) -> None:
        self.failures.append((exchange, str(error)))

    def waited(self, exchange: ExchangeEvent, start_s: float, end_s: float) -> None:
        self.waits.append((exchange.name, end_s - start_s))

    def phase(self, name: str, start_s: float) -> None:
        self.phases.append(name)

    def step_ended(self, step: int, end_s: float) -> None:
        self.phases.append(f"end of {step}")

    def close(self) -> None:
        self.endings.append("closed")

    def abandon(self) -> None:
        self.endings.append("abandoned")


#: What ranks were told whose training did not come to its end.
everybodys_notes: list[Notes] = []


def train(
    *strategy: str,
    forward_s: float = 0.0,
    late: Mapping[tuple[int, int], float] | None = None,
    steps: int = STEPS,
) -> tuple[Notes, Counters]:
    """Train on this rank, and return what was told until the session was closed.

    Args:
        strategy: as `compose` takes it.
        forward_s: what each forward takes.
        late: what it takes more, by rank and step.
        steps: how many there are.
    """
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peer, notes = hocket.join(), Notes()
    everybodys_notes.append(notes)
    with hocket.attach(model, optimizer, hocket.compose(*strategy), observer=notes) as session:
        for number, x in enumerate(session.data([torch.randn(2, WIDTH) for _ in range(steps)])):
            peer.clock.elapse(forward_s + (late or {}).get((peer.rank, number), 0.0))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        peer.clock.elapse(forward_s)
    return notes, session.counters


class NoSegments(Channel):
    """A channel that nothing is sent on."""

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        raise AssertionError("nothing to send")


def exchange_of(
    peer: Peer, counters: Counters, observer: Observer, progress: ProgressEngine | None = None
) -> ActiveExchange:
    """Return an exchange of no segments, which counts into `counters` and notifies `observer`."""
    exchange = hocket.compose("sgd").gradients[0]
    return ActiveExchange(
        exchange, [0], peer, [], NoSegments([], {}), progress or InlineProgress(), counters, 1.0, observer
    )


def share(counters: Counters) -> float:
    return 1 - counters.exposed_wait_s / counters.under_way_s


def test_an_exchange_that_nothing_hides_has_share_0() -> None:
    world = hocket.virtual(RANKS, network=NETWORK)
    for notes, counters in world.run(lambda: train("sgd", forward_s=1.0)):
        assert counters.under_way_s == pytest.approx(STEPS * EXCHANGE_S, rel=0.02)
        assert share(counters) == pytest.approx(0.0, abs=1e-9)
        assert [seconds for _, seconds in notes.waits] == pytest.approx([EXCHANGE_S] * STEPS, rel=0.02)


DELAYED = ("periodic_average", "parameters.0.every=1", "parameters.0.delay=1")


def test_one_that_computing_hides_has_share_1() -> None:
    world = hocket.virtual(RANKS, network=NETWORK)
    for _, counters in world.run(lambda: train(*DELAYED, forward_s=2 * EXCHANGE_S)):
        assert counters.under_way_s >= STEPS * EXCHANGE_S
        assert share(counters) == 1.0


def test_one_that_computing_hides_by_half_has_share_one_half() -> None:
    world = hocket.virtual(RANKS, network=NETWORK)
    # Before the second step ranks meet once, which hides some of the first exchange.
    for _, counters in world.run(lambda: train(*DELAYED, forward_s=EXCHANGE_S / 2, steps=3 * STEPS)):
        assert share(counters) == pytest.approx(0.5, abs=0.02)


def test_time_in_which_several_are_under_way_counts_once() -> None:
    counters = Counters()
    for start_s in (0.0, 1.0, 2.0):
        counters.note_start(start_s)
    for end_s in (3.0, 3.5, 4.0):
        counters.note_end(end_s)
    assert counters.under_way_s == 4.0
    counters.note_start(7.0)
    counters.note_end(7.5)
    assert counters.under_way_s == 4.5


RESIDUALS = (
    "sgd",
    "gradients.0.collective=sparse_allreduce",
    "gradients.0.compressor={name: error_feedback, compressor: {name: topk, density: 0.01}}",
)


def test_who_waits_to_agree_waits() -> None:
    """Ranks that keep residuals agree on weights when backward begins: there the early rank waits for the late one."""
    world = hocket.virtual(RANKS, network=NETWORK)
    late = {(1, step): 0.5 for step in range(STEPS)}
    [(notes, early), (_, delayed)] = world.run(lambda: train(*RESIDUALS, forward_s=0.01, late=late))
    assert early.exposed_wait_s == pytest.approx(0.5 * STEPS + delayed.exposed_wait_s, rel=1e-9)
    assert delayed.exposed_wait_s < 0.1
    agreed = [seconds for name, seconds in notes.waits if name == "gradients.0 weights"]
    assert agreed == pytest.approx([0.5] * STEPS, abs=1e-3)
    assert sum(seconds for _, seconds in notes.waits) == pytest.approx(early.exposed_wait_s)


def test_who_waits_for_a_batch_waits() -> None:
    """Loaders without a length have ranks ask before each batch whether one of them has another."""

    def body() -> float:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer, peer = torch.optim.SGD(model.parameters(), lr=0.01), hocket.join()
        with hocket.attach(model, optimizer, "local") as session:
            for x in session.data(iter([torch.randn(2, WIDTH)] * STEPS), same_batches=True):
                peer.clock.elapse(0.5 * peer.rank)
                session.train_batch((x, x), nn.functional.mse_loss)
        return session.counters.exposed_wait_s

    early, late = hocket.virtual(RANKS).run(body)
    assert early - late == pytest.approx(0.5 * STEPS, rel=1e-6)


def test_who_waits_for_buffers_waits() -> None:
    """Ranks that average BatchNorm's statistics alone meet there."""

    def body() -> tuple[float, list[str]]:
        torch.manual_seed(0)
        model, notes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), Notes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = hocket.compose("periodic_average", "parameters.0.every=1", "parameters.0.buffers=mean")
        with hocket.attach(model, optimizer, strategy, observer=notes) as session:
            own = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(session.rank))
            for x in session.data([own] * STEPS):
                session.train_batch((x, x), nn.functional.mse_loss)
        assert session.counters.exposed_wait_s == pytest.approx(sum(seconds for _, seconds in notes.waits))
        return sum(seconds for name, seconds in notes.waits if "buffers" in name), [
            e.name for e in notes.over
        ]

    for waited_s, names in hocket.virtual(RANKS, network=NETWORK).run(body):
        assert waited_s == pytest.approx(STEPS * NETWORK.allreduce_seconds(2 * 4 * WIDTH, RANKS), rel=1e-3)
        assert names.count("parameters.0 buffers") == STEPS


def test_events_of_a_training() -> None:
    for notes, counters in hocket.virtual(RANKS).run(lambda: train("sgd")):
        assert [(e.name, e.round) for e in notes.begun] == [("gradients.0[0]", r) for r in range(STEPS)]
        assert [e.round for e in notes.over] == list(range(STEPS))
        assert all(e.end_s is None for e in notes.begun)
        assert all(e.end_s is not None and e.end_s > e.start_s for e in notes.over)
        assert sum(e.num_bytes for e in notes.over) == counters.bytes_sent
        assert notes.phases == [
            told for step in range(STEPS) for told in ("forward", "backward", "optimizer", f"end of {step}")
        ]
        assert (notes.failures, notes.endings) == ([], ["closed"])


def test_parameters_are_a_phase_of_their_own() -> None:
    [(notes, _), *_] = hocket.virtual(RANKS).run(lambda: train("periodic_average", "parameters.0.every=2"))
    assert notes.phases[:4] == ["forward and backward", "optimizer", "parameters", "end of 0"]


def test_a_failed_exchange_is_told_with_its_error() -> None:
    everybodys_notes.clear()
    world = hocket.virtual(RANKS, timeout_s=1.0)
    with pytest.raises(ExchangeTimeoutError) as raised:
        world.run(lambda: train("sgd", late={(1, 2): 10.0}))
    [notes] = [notes for notes in everybodys_notes if notes.failures]
    [(event, error)] = notes.failures
    assert (event.name, event.round, error) == ("gradients.0[0]", 2, str(raised.value))
    assert event.end_s == pytest.approx(event.start_s + 1.0)
    name, seconds = notes.waits[-1]
    assert name == "gradients.0[0]"
    assert seconds == pytest.approx(1.0)
    assert all(n.endings == ["abandoned"] for n in everybodys_notes)


def test_an_exchange_that_cannot_be_started_is_told_too() -> None:
    def body() -> tuple[Notes, Counters]:
        peer, notes, counters = hocket.join(), Notes(), Counters()
        lane = peer.lane("closed")
        lane.close()
        with pytest.raises(TransportError, match="is closed"):
            exchange_of(peer, counters, notes).wait_for(lane.ibarrier, "x", 8)
        return notes, counters

    for notes, counters in hocket.virtual(2).run(body):
        assert [(e.name, e.num_bytes) for e, _ in notes.failures] == [("gradients.0 x", 8)]
        assert (notes.over, notes.waits) == ([], [])
        counters.note_start(20.0)
        counters.note_end(22.0)
        assert counters.under_way_s == pytest.approx(2.0, abs=0.1), "it is under way no longer"


class LooksWithin(Request):
    """A request whose wait looks at its exchange, as waits between hosts do, to begin what is in its turn."""

    def __init__(self) -> None:
        self.looks: Callable[[], None] = lambda: None
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float | None = None) -> str:
        self.over = True
        self.looks()
        return "result"


def test_an_exchange_that_a_wait_finds_over_twice_ends_once() -> None:
    peer, notes, counters, request, progress = (
        SinglePeer(),
        Notes(),
        Counters(),
        LooksWithin(),
        InlineProgress(),
    )
    request.looks = progress.advance
    opened = exchange_of(peer, counters, notes, progress)
    assert opened.wait_for(lambda: request, "x", 8) == "result"
    assert [e.name for e in notes.begun] == [e.name for e in notes.over] == ["gradients.0 x"]
    counted_s = counters.under_way_s
    counters.note_start(20.0)
    counters.note_end(22.0)
    assert counters.under_way_s - counted_s == 2.0
    assert opened.wait_for(Finished, "y", 8) is None


def test_without_an_observer_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("made although nobody asked")

    for made in (ExchangeEvent, Recorder, TracedPeer, TracedLane, TracedRequest):
        monkeypatch.setattr(made, "__init__", forbidden)

    def body() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hocket.attach(model, optimizer, "sgd") as session:
            for x in session.data([torch.ones(1, 2)]):
                model(x).sum().backward()
                optimizer.step()
            assert session.counters.under_way_s > 0

    hocket.virtual(RANKS).run(body)
    with pytest.raises(AssertionError, match="nobody asked"):
        hocket.virtual(RANKS).run(lambda: train("sgd"))
