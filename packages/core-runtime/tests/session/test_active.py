"""An open exchange: looks at its requests in turns, and refusals of what a collective's author forgot to return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.collective.allreduce import Allreduce
from hocket.collective.api import Channel, Choices, Outcome
from hocket.errors import UserError
from hocket.progress import InlineProgress, ProgressEngine
from hocket.segment.partition import Model, named_spans, partition
from hocket.segment.segment import Segment
from hocket.session.exchange.active import ActiveExchange, Counters
from hocket.transport.peer import Peer
from hocket.transport.request import Request
from hocket.transport.single import SinglePeer


class Counting(Request[Outcome]):
    """Done at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def wait(self, timeout_s: float | None = None) -> Outcome:
        return Outcome(0, included=True, num_active=1)


class CountingChannel(Channel):
    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__(segments, {})
        self.requests = [Counting() for _ in segments]

    def start(self, segments: Sequence[Segment], round: int) -> Request[Outcome]:
        return self.requests[segments[0].index]


def started(count: int) -> tuple[ActiveExchange, list[Counting]]:
    """Return an exchange of `count` segments that are all under way, and their requests."""
    [spans] = partition(named_spans([("p", torch.zeros(2))]), Model())
    numel = spans[-1].padded_numel
    segments = [
        Segment(f"gradients.0[{i}]", i, spans, torch.zeros(numel), torch.zeros(numel)) for i in range(count)
    ]
    channel = CountingChannel(segments)
    opened = ActiveExchange(
        hocket.compose("sgd").gradients[0],
        [0],
        SinglePeer(),
        segments,
        channel,
        InlineProgress(),
        Counters(),
        1.0,
    )
    for segment in segments:
        opened.start(segment)
    return opened, channel.requests


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_requests_under_way_are_looked_at_in_turns(count: int) -> None:
    opened, requests = started(count)
    total = 0
    for _ in range(3 * count):
        opened.progress.advance()
        looks = [request.looks for request in requests]
        assert sum(looks) - total <= 8, "a moment is not used for more than a few"
        assert max(looks) - min(looks) <= 1, "one is looked at twice before another one"
        total = sum(looks)
    assert total == 3 * count, "what is done is looked at no more"


def test_what_was_waited_for_is_looked_at_no_more() -> None:
    opened, requests = started(3)
    opened.finish(opened.segments[1])
    opened.wait(opened.segments[0])
    opened.progress.advance()
    assert [request.looks for request in requests] == [0, 0, 1]


class ForgetfulChannel(Channel):
    def __init__(self, peer: Peer, segments: Sequence[Segment], forgotten: str) -> None:
        super().__init__(segments, {segment.index: peer.lane(segment.name) for segment in segments})
        self._forgotten = forgotten

    def start(self, segments: Sequence[Segment], round: int) -> Any:
        [segment] = segments
        request = self._lanes[segment.index].iallreduce(segment.outgoing_array, segment.incoming_array)
        return request.then(lambda _: None) if self._forgotten == "outcome" else None


@dataclass(frozen=True)
class ForgetfulMean(Allreduce):
    """A mean whose author forgot a `return`."""

    forgotten: str = "outcome"

    def open(
        self, peer: Peer, segments: Sequence[Segment], progress: ProgressEngine, choices: Choices
    ) -> Channel:
        return ForgetfulChannel(peer, segments, self.forgotten)


@pytest.mark.parametrize(("forgotten", "due"), [("outcome", "an Outcome"), ("request", "a request")])
def test_a_collective_that_returns_nothing_is_named(forgotten: str, due: str) -> None:
    strategy = hocket.compose("sgd")
    forgetful = replace(strategy.gradients[0], collective=ForgetfulMean(forgotten=forgotten))

    def train() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hocket.attach(model, optimizer, replace(strategy, gradients=(forgetful,))):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    method = r"gradients\.0: ForgetfulChannel\.start of collective ForgetfulMean \(\S+\)"
    with pytest.raises(UserError, match=rf"{method}.* None instead of {due}: return"):
        hocket.virtual(2).run(train)
