"""Overlap backward hides communication: exact, on the virtual clock, where computing costs what the test charges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.transport.network import NetworkModel

LAYERS, WIDTH, STEPS, RANKS = 5, 64, 3, 4
BACKWARD_S = 0.010
# An allreduce of a layer (4,160 floats, padding and trailer beside) takes about 8 ms.
NETWORK = NetworkModel(latency_s=1e-4, bandwidth_bits_per_s=27.2e6)


def charging(layer: nn.Module) -> nn.Module:
    """Let the layer's backward cost time, before its parameters' gradients arrive."""

    def charge(_: torch.Tensor) -> None:
        hocket.join().clock.elapse(BACKWARD_S)

    layer.register_forward_hook(lambda *call: call[-1].register_hook(charge) and None)
    return layer


def exposed_wait_s(recipe: str) -> float:
    """Return the seconds per step in which rank 0 waits."""

    def train() -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*(charging(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hocket.attach(
            model, optimizer, hocket.compose(recipe, "gradients.0.segments=layers")
        ) as session:
            for x in session.data([torch.randn(2, WIDTH) for _ in range(STEPS)]):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            return session.counters.exposed_wait_s / STEPS

    return hocket.virtual(RANKS, network=NETWORK).run(train)[0]


def test_only_the_last_layer_s_exchange_is_exposed() -> None:
    one_layer_s = NETWORK.allreduce_seconds(4 * (WIDTH * WIDTH + WIDTH), RANKS)
    assert 0.7 * BACKWARD_S < one_layer_s < BACKWARD_S
    assert exposed_wait_s("sgd") == pytest.approx(LAYERS * one_layer_s, rel=0.02)
    assert exposed_wait_s("agd") == pytest.approx(one_layer_s, rel=0.02)
