"""Mistakes that the conformance suite finds."""

from __future__ import annotations

import pytest
from cases import GossipInARing

from hocket.collective.gossip import GossipChannel
from hocket.segment.segment import Segment
from hocket.testing.collective import Shape
from hocket.transport.request import Request


def test_writing_before_values_are_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send = GossipChannel._send

    def write_early(channel: GossipChannel, segment: Segment, round: int) -> Request:
        request = send(channel, segment, round)
        segment.incoming.zero_()
        return request

    monkeypatch.setattr(GossipChannel, "_send", write_early)
    suite = GossipInARing()
    suite.check(3, [Shape(0, 7, 0, "float32")], 2, faulty=True)  # into a buffer of its own
    with pytest.raises(AssertionError, match="round 0, segment 0"):
        suite.test_results_are_written_over_what_was_sent()
