"""The ranks' part of tests of a collective: random rounds, in orders and at times of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import torch

from hocket.arrays import Array
from hocket.collective.api import Channel, Outcome
from hocket.config.source import load_document
from hocket.plain import Tree, TreeView
from hocket.plugin import default_registry
from hocket.progress import InlineProgress, ProgressEngine, ThreadProgress
from hocket.segment.partition import Model, ParameterSpan, named_spans, partition
from hocket.segment.segment import Segment, allocate
from hocket.segment.shape import SegmentShape, wire_dtype
from hocket.strategy.compose import read_slot
from hocket.strategy.exchange import Exchange
from hocket.transport.faults import Faults
from hocket.transport.peer import Peer
from hocket.transport.request import Request

__all__ = ["Case", "Shape", "contribution", "exchange_rounds", "sample", "shape_of", "time_round"]

_MOST_REPORTED = 2048


@dataclass(frozen=True)
class Shape:
    """A segment to exchange.

    Attributes:
        index: the segment's number in the exchange.
        numel: the number of elements of its one parameter; the segment has padding behind them.
        trailer_numel: the number of elements behind the padding.
        dtype: the parameter's dtype: float32, float64 or bfloat16, which travels as float32.
    """

    index: int
    numel: int
    trailer_numel: int
    dtype: str


@dataclass(frozen=True)
class Case:
    """A case to test: an exchange, its segments, rounds, and faults.

    Attributes:
        slot: `gradients` or `parameters`.
        exchange: the exchange, as a config writes it.
        shapes: the shapes of the channel's segments.
        rounds: the number of rounds, counted from 0.
        seed: the seed of the values and of each rank's orders and delays.
        threaded: whether schedules have a thread of their own, if the collective leaves it open.
        faulty: whether messages are delayed and overtake each other.
        resumed_at: the round before which a new channel takes over the old one's state; None for never.
        lateness_s: seconds by which each rank comes to every round after the rank before it.
        in_place: whether segments have one buffer for both where `Collective.in_place` asks for it.
    """

    slot: str
    exchange: TreeView
    shapes: Sequence[Shape]
    rounds: int
    seed: int = 0
    threaded: bool = False
    faulty: bool = False
    resumed_at: int | None = None
    lateness_s: float = 0.0
    in_place: bool = False

    def to_json(self) -> Tree:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: TreeView) -> Case:
        """Return the case that `to_json` was called on."""
        return cls(**{**plain, "shapes": [Shape(**shape) for shape in plain["shapes"]]})


def exchange_rounds(peer: Peer, plain: TreeView) -> list[list[str]]:
    """Carry out a case, given as of `Case.to_json`.

    Returns:
        The bytes of a sample of `incoming` in each round, for each segment in the order of the shapes, in
        hexadecimal.
    """
    case = Case.from_json(plain)
    exchange = _composed(case.slot, json.dumps(case.exchange))
    if case.faulty:
        peer = Faults(seed=case.seed, delay_s=(0.0, 1e-3), reorder=0.2).wrap(peer)
    own = random.Random(f"{case.seed} {peer.rank}")
    scale = exchange.collective.traits.contribution_scale(peer.size)
    segments = [_segment(peer, shape, exchange if case.in_place else None) for shape in case.shapes]
    threaded = case.threaded or exchange.collective.traits.needs_thread
    progress: ProgressEngine = ThreadProgress() if threaded else InlineProgress()
    channel = exchange.collective.open(peer, segments, progress, exchange.choices)
    received = []
    for round in range(case.rounds):
        if round == case.resumed_at:
            channel = _resumed(channel, peer, segments, progress, exchange, round)
        for segment, shape in zip(segments, case.shapes, strict=True):
            value = contribution(case, peer.rank, round, shape)
            segment.outgoing.copy_(torch.from_numpy(value * scale))
        peer.clock.elapse(case.lateness_s * peer.rank)
        _exchange(channel, peer, segments, progress, round, own)
        received.append([sample(segment.incoming_array).tobytes().hex() for segment in segments])
    channel.close()
    progress.close()
    return received


@dataclass(frozen=True)
class _Sizes(SegmentShape):
    spans: tuple[ParameterSpan, ...]
    trailer_numel: int


def shape_of(shape: Shape) -> SegmentShape:
    """Return a segment's layout, on which the size of a message depends."""
    return _Sizes(tuple(_spans(shape)), shape.trailer_numel)


def sample(values: Array) -> Array:
    """Return some thousand of many values [..., n], evenly spaced along the last axis: mpiexec's output is slow."""
    return values[..., :: 1 + values.shape[-1] // _MOST_REPORTED]


def time_round(peer: Peer, plain: TreeView) -> float:
    """Return the seconds that a case's first segment takes if all ranks start it together."""
    case = Case.from_json(plain)
    exchange = _composed(case.slot, json.dumps(case.exchange))
    segment = _segment(peer, case.shapes[0])
    progress = ThreadProgress()
    channel = exchange.collective.open(peer, [segment], progress, exchange.choices)
    peer.lane("together").ibarrier().wait()
    start_s = peer.clock.now()
    channel.start([segment], 0).wait()
    seconds = peer.clock.now() - start_s
    channel.close()
    progress.close()
    return seconds


def contribution(case: Case, rank: int, round: int, shape: Shape) -> Array:
    """Return a rank's random values, float64 [n], rounded to the shape's dtype, padding included.

    With a compressor padding is 0, as compressors leave it out.
    """
    padded_numel = _spans(shape)[-1].padded_numel
    drawn = np.random.default_rng([case.seed, rank, round, shape.index]).standard_normal(
        padded_numel + shape.trailer_numel
    )
    if "compressor" in case.exchange:
        drawn[shape.numel : padded_numel] = 0
    return torch.from_numpy(drawn).to(getattr(torch, shape.dtype)).double().numpy()


def _exchange(
    channel: Channel,
    peer: Peer,
    segments: Sequence[Segment],
    progress: ProgressEngine,
    round: int,
    own: random.Random,
) -> None:
    """Start the segments in an order of this rank's own, and wait for them in another."""
    requests: list[tuple[Segment, bytes, Request[Outcome]]] = []
    for segment in own.sample(segments, len(segments)):
        peer.clock.elapse(own.choice([0.0, 0.0, 1e-6, 1e-3]))
        outgoing = segment.outgoing_array.tobytes()
        request = channel.start([segment], round)
        requests.append((segment, outgoing, request))
        if own.random() < 0.3:
            for _, _, started in requests:
                started.done()
            progress.advance()
        if own.random() < 0.3:
            own.choice(requests)[2].done()
    own.shuffle(requests)
    for segment, sent, request in requests:
        outcome = request.wait()
        assert isinstance(outcome, Outcome)
        assert request.done()
        assert request.result == outcome
        assert outcome.round == round
        assert 0 <= outcome.num_active <= peer.size
        if segment.incoming is not segment.outgoing:
            assert segment.outgoing_array.tobytes() == sent, f"{segment.name}: outgoing was changed"


def _resumed(
    channel: Channel,
    peer: Peer,
    segments: Sequence[Segment],
    progress: ProgressEngine,
    exchange: Exchange,
    round: int,
) -> Channel:
    state = channel.state_dict()
    channel.close()
    resumed = exchange.collective.open(peer, segments, progress, exchange.choices)
    resumed.resume({segment.index: round for segment in segments}, state)
    return resumed


@lru_cache(maxsize=64)
def _composed(slot: str, exchange: str) -> Exchange:
    # On its own: some collectives mean something only with others after them.
    registry = default_registry()
    where = load_document({slot: [json.loads(exchange)]}, (), registry).root.child("strategy").child(slot)
    return read_slot(slot, where, registry)[0]


def _segment(peer: Peer, shape: Shape, in_place: Exchange | None = None) -> Segment:
    """Return a segment; with one buffer if `in_place` is an exchange whose collective asks for it."""
    spans = _spans(shape)
    dtype = wire_dtype(spans[0].dtype)
    numel = spans[-1].padded_numel + shape.trailer_numel
    outgoing, incoming = [allocate(peer, numel, dtype, torch.device("cpu")) for _ in range(2)]
    if in_place is not None:
        shared = peer.memory.works_in_place(outgoing.numpy())
        if in_place.collective.in_place(in_place.choices, shared):
            incoming = outgoing
    return Segment(f"tested[{shape.index}]", shape.index, spans, outgoing, incoming)


def _spans(shape: Shape) -> Sequence[ParameterSpan]:
    parameter = torch.zeros(shape.numel, dtype=getattr(torch, shape.dtype))
    return partition(named_spans([("p", parameter)]), Model())[0]
