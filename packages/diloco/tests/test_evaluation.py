"""The bytes of DiLoCo's evaluation, as in the README: seconds of a virtual network without latency."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.api import NetworkModel

RANKS, BYTES_PER_S = 4, 1e6
WIDTHS = (1000, 100)


def evaluated() -> tuple[float, float, float]:
    """Return seconds of a consensus and of a distance from it, and the bytes that are counted for both."""
    torch.manual_seed(0)
    model = nn.Linear(*WIDTHS, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peer = hocket.join()
    with hocket.attach(model, optimizer, "diloco") as session:
        model(torch.randn(4, WIDTHS[0]) * (1 + peer.rank)).square().mean().backward()
        optimizer.step()
        session.settle()
        begun_s, sent = peer.clock.now(), session.counters.bytes_sent
        with session.consensus():
            shown_s = peer.clock.now()
        session.consensus_distance()
        return shown_s - begun_s, peer.clock.now() - shown_s, session.counters.bytes_sent - sent


def test_a_consensus_sends_no_parameters_and_a_distance_is_an_allreduce() -> None:
    network = NetworkModel(latency_s=0.0, bandwidth_bits_per_s=8 * BYTES_PER_S)
    allreduce_s = 2 * (RANKS - 1) / RANKS * 4 * WIDTHS[0] * WIDTHS[1] / BYTES_PER_S
    for consensus_s, distance_s, counted in hocket.virtual(RANKS, network=network).run(evaluated):
        # Beside parameters, ranks compare what they have done.
        assert consensus_s < 0.01 * allreduce_s
        assert distance_s == pytest.approx(allreduce_s, rel=0.01)
        assert counted == 0
